"""The loader: the same batches whoever makes them, exact resume after any kill, clear faults, no leak."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from vlaforge.data.dataset import Dataset, DatasetInfo, Episode
from vlaforge.data.dummy import DummyDataset, DummyProcessing
from vlaforge.data.errors import UserError
from vlaforge.data.loader import build_loader
from vlaforge.data.maker import SampleError
from vlaforge.data.parcel import Ring, pack
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import (
    ACTION,
    ACTION_IS_PAD,
    IMAGES,
    STATE,
    Batch,
    Contract,
    DataNeeds,
    Draw,
    DrawSpec,
    Field,
    Minibatch,
    Trim,
)

CONTRACT = Contract(
    {
        "x": Field((3,), torch.float32, "D"),
        "tokens": Field((12,), torch.int64, "L", 1, 9),
        "token_mask": Field((12,), torch.bool, "L"),
        "image_mask": Field((3,), torch.bool, "V"),
        "images": Field((3, 2, 2, 3), torch.uint8, "VHWC", 0, 256),
    },
    {"noise": DrawSpec((2,)), "time": DrawSpec(kind="stratified"), "drop": DrawSpec(kind="seed")},
    (
        Trim("token_mask", (("tokens", 1), ("token_mask", 1)), "prefix", multiple=4),
        Trim("image_mask", (("images", 1),), "any"),
    ),
)


class Memory(Dataset):
    """Three episodes of which the middle one is left out, so that row ids and positions differ."""

    def __init__(self, broken: int | None = None, error: type[Exception] = ValueError):
        self.info = DatasetInfo(Path("memory"), "memory", "1", 10.0, {}, 3, 3)
        self.episodes = [Episode(0, 17, 0), Episode(2, 30, 40)]
        self.broken, self.error = broken, error

    def get(self, position: int, needs: DataNeeds) -> dict:
        row = self.row_id(position)
        if row == self.broken:
            raise self.error("the frame is torn")
        return {"index": row, "task": "t"}

    def column(self, key, episode):
        raise KeyError(key)

    def fingerprint(self) -> str:
        return "memory"


class Processing:
    """Writes the row and an augmentation number into x; token and camera masks depend on the row."""

    def __init__(self, kill_at: int | None = None):
        self.kill_at = kill_at

    def needs(self) -> DataNeeds:
        return DataNeeds()

    def sample(self, sample, rng, training):
        row = sample["index"]
        if row == self.kill_at and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        length = 1 + row % 6
        mask = np.arange(12) < length
        return {
            "x": np.array([row, rng.random(), float(training)], np.float32),
            "tokens": np.where(mask, row + 1, 0).astype(np.int64),
            "token_mask": mask,
            "image_mask": np.array([True, False, row % 20 == 0]),
            "images": np.full((3, 2, 2, 3), row % 256, np.uint8),
        }


def loader(dataset=None, processing=None, **options):
    options = {"batch_size": 3, "seed": 7, "multiprocessing_context": "fork", **options}
    return build_loader(dataset or Memory(), processing or Processing(), CONTRACT, **options)


def content(minibatch) -> list[tuple]:
    """One entry a sample: its row, its augmentation, its draws."""
    x, draw = minibatch.batch["x"], minibatch.draw
    parts = (minibatch.ids.tolist(), x[:, 1].tolist(), draw["noise"].tolist(), draw["drop"].tolist())
    return [(i, a, tuple(n), d) for i, a, n, d in zip(*parts)]


def take(source, count: int) -> list[tuple]:
    return [entry for _ in range(count) for entry in content(next(source))]


@pytest.fixture(scope="module")
def reference() -> list[tuple]:
    """The samples of six epochs in order."""
    with loader(batch_size=1, epochs=6) as source:
        return [entry for minibatch in source for entry in content(minibatch)]


def test_reference_has_each_row_once_an_epoch_and_new_randomness_each_time(reference):
    rows = Counter(entry[0] for entry in reference)
    assert rows == Counter(dict.fromkeys([*range(17), *range(40, 70)], 6))
    assert len({entry[1] for entry in reference}) == len(reference) == len({entry[3] for entry in reference})


def test_twenty_kills_across_workers_and_ranks(reference):
    """At each kill every process is dropped; the next has other ranks and workers and only the saved integers."""
    rng, state, got = random.Random(0), None, []
    for _ in range(20):
        world, workers = rng.choice([1, 2, 4]), rng.choice([0, 1, 2])
        sampler, batch = rng.choice(["cyclic", "block"]), rng.choice([1, 2, 3])
        ranks = [
            loader(batch_size=batch, rank=rank, world=world, sampler=sampler, num_workers=workers)
            for rank in range(world)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(rng.randint(1, 3)):
            got += sorted(entry for rank in ranks for entry in content(next(rank)))
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)  # prefetched batches do not count
        state = states[0]
        for rank in ranks:
            rank.close()
        assert state["samples"] == len(got)
    assert 94 < len(got) < len(reference)  # more than two epochs
    assert Counter(got) == Counter(reference[: len(got)])


def test_killed_worker_is_reported_and_the_run_resumes(reference):
    def resumed(state, **options):
        source = loader(**options)
        source.load_state_dict(state)
        return source

    victim = reference[10][0]
    source = loader(processing=Processing(kill_at=victim), batch_size=1, num_workers=1)
    got = []
    with pytest.raises(RuntimeError, match=r"data worker died.*memory"):
        while True:
            got += content(next(source))
    assert got == reference[: len(got)] and len(got) <= 10
    with resumed(source.state_dict(), batch_size=2, num_workers=1) as again:
        got += take(again, 10)
    assert got == reference[: len(got)]


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_start_methods_make_the_same_batches(context):
    contract = Contract(
        {"x": Field((3,), torch.float32, "D"), "n": Field((2,), torch.int64, "D", 0, 50)}, {"noise": DrawSpec((2,))}
    )

    def batches(workers):
        source = build_loader(
            DummyDataset(23), DummyProcessing(contract), contract, batch_size=4, epochs=2, num_workers=workers,
            multiprocessing_context=context if workers else None,
        )  # fmt: skip
        with source:
            return [(m.ids, m.batch["x"], m.draw["noise"]) for m in source]

    alone, with_worker = batches(0), batches(1)
    assert len(alone) == 12 == len(with_worker)
    assert all(torch.equal(a, b) for one, two in zip(alone, with_worker) for a, b in zip(one, two))


@pytest.mark.parametrize("slot", [1 << 12, 64])
def test_a_batch_crosses_in_a_slot_of_shared_memory_or_by_itself_where_it_is_too_large(slot):
    generator = torch.Generator().manual_seed(0)
    ring = Ring(workers=1, prefetch=1, slot=slot)
    kept, expected = [], []
    for number in range(5):  # more than there are slots: what was opened stays as it was
        batch = Batch(
            images=torch.randint(0, 256, (3, 5, 7), generator=generator, dtype=torch.uint8),
            mask=torch.rand(3, 11, generator=generator) < 0.5,
            tokens=torch.randint(0, 9, (3, 13 + number), generator=generator),
            turned=torch.rand(4, 3, generator=generator).T,
            none=torch.zeros(3, 0, 2),
        )
        draw = Draw(time=torch.rand(3, generator=generator), half=torch.rand(3, 3, generator=generator).bfloat16())
        expected.append(Minibatch(batch, draw, torch.tensor([7, 2, number]), epoch=4, stream="a"))
        parcel = pack(expected[-1], ring)
        assert (parcel.place is None) == (slot == 64) and (parcel.memory is None) == (slot != 64)
        kept.append(pickle.loads(pickle.dumps(parcel)).open() if slot != 64 else parcel.open())
    for got, wanted in zip(kept, expected):
        assert (got.epoch, got.stream, got.ids.tolist()) == (4, "a", wanted.ids.tolist())
        for ours, theirs in ((got.batch, wanted.batch), (got.draw, wanted.draw)):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name


def test_a_slow_consumer_never_sees_a_slot_written_again():
    """Batches are kept, and compared at the end with what a loader without workers makes."""
    options = {"batch_size": 2, "epochs": 4, "num_workers": 2, "prefetch": 1}
    with loader(**options) as fast, loader(**options | {"num_workers": 0}) as plain:
        held = []
        for number, minibatch in enumerate(fast):
            held.append(minibatch)
            time.sleep(0.02 if number % 7 == 0 else 0)
        for got, wanted in zip(held, plain, strict=True):
            assert content(got) == content(wanted) and torch.equal(got.batch["images"], wanted.batch["images"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_names_dataset_episode_and_frame(workers):
    with pytest.raises(SampleError, match=r"ValueError: the frame is torn .*'memory', episode 2, frame 5"):
        take(loader(Memory(broken=45), num_workers=workers, shuffle=False), 30)
    with pytest.raises(UserError, match=r"^the frame is torn .*episode 0, frame 3"):
        take(loader(Memory(broken=3, error=UserError), num_workers=workers, shuffle=False), 30)


def test_a_processing_that_breaks_the_contract_is_said():
    class Wrong(Processing):
        def sample(self, sample, rng, training):
            fields = super().sample(sample, rng, training)
            return {name: value for name, value in fields.items() if name != "token_mask"}

    with pytest.raises(SampleError, match="no 'token_mask'"):
        next(loader(processing=Wrong()))

    class Half(Processing):
        def sample(self, sample, rng, training):
            return {**super().sample(sample, rng, training), "x": np.zeros(3)}

    with pytest.raises(SampleError, match=r"'x' is torch\.float64"):
        next(loader(processing=Half()))


def test_trimming_changes_nothing_that_is_used():
    with loader(epochs=1) as trimmed, loader(epochs=1, trim=False) as whole:
        for cut, full in zip(trimmed, whole, strict=True):
            assert torch.equal(cut.ids, full.ids)
            longest = int(full.batch["token_mask"].sum(1).max())
            length = cut.batch["tokens"].shape[1]
            assert length == min(12, -(-longest // 4) * 4) == cut.batch["token_mask"].shape[1]
            assert torch.equal(cut.batch["tokens"], full.batch["tokens"][:, :length])
            kept = torch.nonzero(full.batch["image_mask"].any(0))[:, 0]
            assert torch.equal(cut.batch["images"], full.batch["images"][:, kept])
            assert cut.batch["image_mask"].shape[1] == 3  # not among the cut: whole


def test_stratified_times_cover_the_step_over_ranks_and_micro_batches():
    ranks = [loader(batch_size=2, accumulate=3, rank=r, world=4) for r in range(4)]
    for _ in range(2):
        times = torch.cat([next(rank).draw["time"] for _ in range(3) for rank in ranks])
        strata = ((times - times.min()) * 24).round().sort().values
        assert torch.equal(strata, torch.arange(24.0))


def test_accumulated_steps_resume_in_the_middle():
    source = loader(batch_size=2, accumulate=3)
    take(source, 4)
    state = source.state_dict()
    assert state["micro"] == 1 and state["samples"] == 8
    other = loader(batch_size=2, accumulate=3)
    other.load_state_dict(state)
    a, b = next(source), next(other)
    assert torch.equal(a.ids, b.ids) and torch.equal(a.draw["time"], b.draw["time"])


def test_resuming_on_other_data_is_refused():
    source = loader()
    take(source, 2)
    state = source.state_dict()
    for change in ({"seed": 8}, {"shuffle": False}, {"streaming": True}):
        with pytest.raises(UserError, match="cannot be resumed: "):
            loader(**change).load_state_dict(state)
    with pytest.raises(UserError, match=r"dataset was memory, now dummy-5"):
        build_loader(DummyDataset(5), Processing(), CONTRACT, batch_size=1, seed=7).load_state_dict(state)


def test_finite_loaders_start_over_and_say_how_long_they_are():
    source = loader(batch_size=4, epochs=1, training=False, shuffle=False)
    once, again = ([content(m) for m in source] for _ in range(2))
    assert once == again and sum(map(len, once)) == 47
    assert source.steps_per_epoch == 47 / 4 and source.waited_s > 0
    assert loader(batch_size=4, drop_last=True).steps_per_epoch == 11


def test_streaming_resumes_exactly(reference):
    def streaming(**more):
        return loader(batch_size=4, streaming=True, **more)

    with streaming(epochs=1) as source:
        whole = [entry for m in source for entry in content(m)]
    assert Counter(e[0] for e in whole) == Counter(e[0] for e in reference[:47])
    first = streaming(num_workers=1)
    got = take(first, 3)
    second = streaming(epochs=1, num_workers=2)
    second.load_state_dict(first.state_dict())
    first.close()
    with second:
        assert got + [entry for m in second for entry in content(m)] == whole
    assert {e[:2] for e in whole} == {e[:2] for e in reference[:47]}  # same augmentations as by random access


def test_close_ends_the_workers():
    source = loader(num_workers=2)
    take(source, 2)
    children = multiprocessing.active_children()
    assert len(children) == 2
    source.close()
    gc.collect()
    for child in children:
        child.join(10)
        assert not child.is_alive()
    assert len(take(source, 1)) == 3  # and it goes on where it stopped
    source.close()


def test_bad_arguments():
    for options, text in (
        ({"num_workers": -1}, "0 or more"),
        ({"rank": 2, "world": 2}, r"outside 0\.\.1"),
        ({"num_workers": 1, "multiprocessing_context": "forkk"}, "did you mean 'fork"),
        ({"batch_size": 0}, "at least 1"),
    ):
        with pytest.raises(UserError, match=text):
            loader(**options)


# --------------------------------------------------------------------------------------------- a real dataset


class AsRead:
    """Passes both cameras, the state and an action chunk on."""

    def needs(self) -> DataNeeds:
        return DataNeeds(action_offsets=tuple(range(8)))

    def sample(self, sample, rng, training):
        return {key: sample[key] for key in REAL.fields}


REAL = Contract(
    {
        IMAGES + "scene": Field((128, 128, 3), torch.uint8, "HWC"),
        IMAGES + "wrist": Field((128, 128, 3), torch.uint8, "HWC"),
        STATE: Field((4,), torch.float32, "S"),
        ACTION: Field((8, 4), torch.float32, "HA"),
        ACTION_IS_PAD: Field((8,), torch.bool, "H"),
    },
    {},
)


def test_real_dataset_batches_equal_single_reads_and_memory_stays(metaworld):
    dataset = open_dataset(metaworld, episodes=[1, 4])
    source = build_loader(
        dataset, AsRead(), REAL, batch_size=16, num_workers=1, multiprocessing_context="fork", epochs=6
    )
    by_row = {dataset.row_id(position): position for position in range(len(dataset))}
    resident, counts = [], Counter()
    for number, minibatch in enumerate(source):
        counts.update(minibatch.ids.tolist())
        if number == 2:
            for i, row in enumerate(minibatch.ids.tolist()):
                alone = dataset.get(by_row[row], AsRead().needs())
                for key in REAL.fields:
                    assert np.array_equal(minibatch.batch[key][i].numpy(), alone[key])
        if source.cursor.epoch > len(resident):
            child = multiprocessing.active_children()[0].pid
            resident.append(_resident(child) + _resident(os.getpid()))
    assert counts == Counter(dict.fromkeys(by_row, 6))
    assert resident[-1] - resident[1] < 24 << 20, resident  # five epochs after the first


def _resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
