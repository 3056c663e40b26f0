"""Orders and schedules: every sample once an epoch, whoever reads it and wherever it was interrupted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlaforge.data.errors import UserError
from vlaforge.data.mixture import Weighted
from vlaforge.data.samplers import MODES, Cursor, Schedule, Shuffled
from vlaforge.data.streaming import StreamOrder

COSTS = np.random.default_rng(0).uniform(1, 100, 200)


def schedule(order, batch=4, world=1, **more) -> Schedule:
    costs = COSTS if more.get("mode") == "balanced" else None
    return Schedule(order, batch, world, costs=costs, **more)


def run(plan: Schedule, at: Cursor, micro_batches: int):
    """(list of {rank: request} for each micro-batch, cursor behind them)."""
    out = []
    for _ in range(micro_batches):
        made = [plan.next(at, rank) for rank in range(plan.world)]
        assert len({after for _, after in made}) == 1  # the ranks agree where they are
        out.append([request for request, _ in made if request is not None])
        at = made[0][1]
    return out, at


def seen(batches) -> Counter:
    return Counter((p, e) for batch in batches for r in batch for p, e in zip(r.positions.tolist(), r.epochs.tolist()))


@settings(max_examples=60)
@given(
    count=st.integers(1, 150),
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
    mode=st.sampled_from(MODES),
    shuffle=st.booleans(),
)
def test_a_finite_schedule_sees_each_sample_once_an_epoch(count, batch, world, mode, shuffle):
    plan = schedule(Shuffled(count, 5, shuffle), batch, world, mode=mode, epochs=3)
    batches, at = run(plan, Cursor(), -(-3 * count // (batch * world)))
    assert seen(batches) == Counter({(p, e): 1 for p in range(count) for e in range(3)})
    assert at == Cursor(3, 0, 3 * count, 0)
    assert all(plan.next(at, rank)[0] is None for rank in range(world))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(MODES), st.booleans())
def test_resume_with_other_ranks_and_batches_continues_the_order(data, mode, drop_last):
    """Whatever was consumed is a prefix of the order; what follows is the rest of it."""
    order, at, got = Shuffled(199, 11), Cursor(), Counter()
    for _ in range(4):
        world, batch = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 6))
        plan = schedule(order, batch, world, mode=mode, drop_last=drop_last)
        batches, at = run(plan, at, data.draw(st.integers(1, 6)))
        got += seen(batches)
        assert max(got.values()) == 1
    positions, _ = order.slice(0, 0, 199)
    if at.epoch == 0:
        assert set(got) == {(int(p), 0) for p in positions[: at.offset]}
    assert at.samples == sum(got.values())


def test_drop_last_leaves_out_only_the_incomplete_step():
    plan = schedule(Shuffled(50), 4, 2, accumulate=2, drop_last=True)  # 16 a step: 48 of 50
    batches, at = run(plan, Cursor(), 7)
    first = seen(batches[:6])
    assert len(first) == 48 and {e for _, e in first} == {0}
    assert {e for _, e in seen(batches[6:])} == {1} and at == Cursor(1, 8, 56, 1)
    with pytest.raises(UserError, match="takes 64 samples"):
        schedule(Shuffled(50), 64, drop_last=True)


def test_without_drop_last_the_batch_is_filled_from_the_next_epoch():
    plan = schedule(Shuffled(10), 4)
    batches, at = run(plan, Cursor(), 5)
    assert [len(b[0].positions) for b in batches] == [4] * 5
    assert batches[2][0].epochs.tolist() == [0, 0, 1, 1]
    assert seen(batches) == Counter({(p, e): 1 for p in range(10) for e in range(2)}) and at.epoch == 2


def test_an_epoch_smaller_than_a_batch_goes_round():
    batches, _ = run(schedule(Shuffled(3), 8), Cursor(), 3)
    assert len(seen(batches)) == 24


@pytest.mark.parametrize("mode", MODES)
def test_places_number_the_global_batch(mode):
    plan = schedule(Shuffled(100), 3, 2, accumulate=4, mode=mode)
    batches, _ = run(plan, Cursor(), 8)
    for step in (batches[:4], batches[4:]):
        requests = [r for batch in step for r in batch]
        assert sorted(np.concatenate([r.places for r in requests]).tolist()) == list(range(24))
        assert len({r.step for r in requests}) == 1 and requests[0].global_batch == 24
    assert batches[0][0].step != batches[4][0].step


def test_balanced_evens_out_what_the_ranks_pay():
    def spread(mode):
        plan = schedule(Shuffled(200, 1), 5, 4, mode=mode)
        paid = [[COSTS[r.positions].sum() for r in batch] for batch in run(plan, Cursor(), 10)[0]]
        return float(np.mean([max(p) / np.mean(p) for p in paid]))

    assert spread("balanced") < 1.05 < spread("cyclic")
    with pytest.raises(UserError, match="cost"):
        Schedule(Shuffled(10), 2, mode="balanced")


def test_order_is_a_function_of_seed_and_epoch():
    def of(seed, epoch):
        return Shuffled(100, seed).slice(epoch, 0, 100)[0].tolist()

    assert of(1, 2) == of(1, 2) and of(1, 2) != of(1, 3) and of(1, 2) != of(2, 2)
    assert sorted(of(1, 2)) == list(range(100)) == Shuffled(100, 1, shuffle=False).slice(5, 0, 100)[0].tolist()


def test_bad_arguments():
    for kwargs in ({"batch_size": 0}, {"batch_size": 1, "world": 0}, {"batch_size": 1, "accumulate": -1}):
        with pytest.raises(UserError, match="at least 1"):
            Schedule(Shuffled(5), **kwargs)
    with pytest.raises(UserError, match="did you mean 'cyclic'"):
        Schedule(Shuffled(5), 1, mode="cyclik")
    with pytest.raises(UserError, match="no samples"):
        Shuffled(0)


# ------------------------------------------------------------------------------------------------- streaming


@settings(max_examples=80)
@given(
    rows=st.lists(st.integers(1, 120), min_size=1, max_size=25),
    block=st.integers(1, 33),
    groups=st.sampled_from([1, 2, 4, 8]),
    streams=st.sampled_from([8, 16, 64]),
    buffer=st.integers(1, 90),
    shuffle=st.booleans(),
    cut=st.floats(0, 1),
)
def test_streaming_visits_every_row_once_and_starts_anywhere(rows, block, groups, streams, buffer, shuffle, cut):
    starts = np.concatenate([[0], np.cumsum(rows)[:-1]]).tolist()
    order = StreamOrder(list(zip(starts, rows)), block, groups=groups, streams=streams, buffer=buffer, shuffle=shuffle)
    positions, _ = order.slice(2, 0, order.size)
    assert sorted(positions.tolist()) == list(range(sum(rows)))
    at = int(cut * order.size)
    assert np.array_equal(order.slice(2, at, order.size)[0], positions[at:])


def test_streaming_reads_nearby_and_keeps_ranks_and_workers_apart():
    shards = [(i * 500, 500) for i in range(80)]
    order = StreamOrder(shards, 8, groups=4, streams=16, buffer=100)
    plan = schedule(order, 8, 2, mode="block")
    touched: dict[tuple[int, int], set[int]] = {}
    batches, _ = run(plan, Cursor(), 200)
    for number, batch in enumerate(batches):
        for rank, request in enumerate(batch):
            reader = (rank, number % 2)  # with two workers each, batches go to them in turn
            touched.setdefault(reader, set()).update((request.positions // 500).tolist())
    readers = list(touched.values())
    assert all(not (a & b) for i, a in enumerate(readers) for b in readers[:i])
    assert max(map(len, readers)) <= 12  # 800 samples out of a dozen of 80 shards


def test_streaming_shuffles_within_its_buffer_and_between_epochs():
    order = StreamOrder([(i * 100, 100) for i in range(40)], 4, groups=1, streams=4, buffer=50, seed=3)
    first, second = (order.slice(e, 0, 400)[0] for e in (0, 1))
    assert not np.array_equal(first, second)
    assert (np.abs(np.diff(first[::4])) < 50).mean() > 0.9  # one stream's steps stay inside a window


# --------------------------------------------------------------------------------------------------- mixture


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    size=st.integers(1, 80),
    shuffle=st.booleans(),
)
def test_mixture_draws_by_weight_and_repeats_nothing_early(counts, weights, size, shuffle):
    weights = weights[: len(counts)]
    order = Weighted(counts, weights, seed=4, shuffle=shuffle, size=size)
    got = Counter()
    for epoch in range(4):
        positions, passes = order.slice(epoch, 0, size)
        got += Counter(zip(positions.tolist(), passes.tolist()))
        owners = np.searchsorted(np.cumsum(counts), positions, side="right")
        drawn = np.bincount(owners, minlength=len(counts))
        assert (np.abs(drawn - np.array(weights) / sum(weights) * size) <= 1).all()
    assert max(got.values()) == 1  # a sample comes again only in its dataset's next pass
