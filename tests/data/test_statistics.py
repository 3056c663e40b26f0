"""Statistics: true quantiles that merge, taken after the action transform, and cached by what made them."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlaforge.data.actions import ActionTransform
from vlaforge.data.dataset import Dataset, DatasetInfo, Episode
from vlaforge.data.errors import UserError
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.readers import open_dataset
from vlaforge.data.sketch import Accumulator, Sketch
from vlaforge.data.statistics import (
    Computed,
    StatisticsSpec,
    cache_folder,
    cached,
    compute,
    sample_rows,
    statistics_of,
    to_json,
)


class Table(Dataset):
    """A dataset of given actions and states, one array [length, D] an episode."""

    def __init__(self, actions: list[np.ndarray], states: list[np.ndarray] | None = None, stored=None, name="table"):
        lengths = [len(a) for a in actions]
        self.data = {"action": actions, "observation.state": states}
        dims = (states[0].shape[1] if states else 0, actions[0].shape[1])
        self.info = DatasetInfo(Path(name), "memory", "1", 10.0, {}, *dims)
        starts = np.cumsum([0, *lengths[:-1]])
        self.episodes = [Episode(i, n, int(s)) for i, (n, s) in enumerate(zip(lengths, starts))]
        self.stored, self.name, self.reads = stored, name, 0

    def get(self, position, needs):
        raise NotImplementedError

    def column(self, key, episode):
        self.reads += 1
        return self.data[key][episode.index]

    def fingerprint(self):
        return self.name

    def stored_statistics(self):
        return self.stored


def walks(seed: int, dims: int = 3, lengths=(40, 9, 25)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.cumsum(rng.normal(0, 0.1, (n, dims)), 0).astype(np.float32) for n in lengths]


# -------------------------------------------------------------------------------------------------- quantiles


@settings(max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60), st.floats(0, 1))
def test_sketch_is_exact_for_few_values(values, q):
    sketch = Sketch()
    sketch.add(np.array(values[: len(values) // 2 + 1]))
    sketch.add(np.array(values[len(values) // 2 + 1 :]))
    expected = np.quantile(np.array(values, np.float32).astype(np.float64), q)
    rounding = 2e-16 * max(map(abs, values))  # interpolation between two values rounds at their size, not the result's
    np.testing.assert_allclose(sketch.quantile(q), expected, rtol=1e-12, atol=max(rounding, 1e-30))


def test_sketch_error_stays_within_its_statement():
    values = np.random.default_rng(0).normal(0, 1, 200_000).astype(np.float32)
    sketch = Sketch(capacity=4096)
    for part in np.array_split(values, 50):
        sketch.add(part)
    assert not sketch.exact and len(sketch.keys) <= 4096
    for q in (0.01, 0.3, 0.5, 0.99):
        true = np.quantile(values.astype(np.float64), q)
        assert abs(sketch.quantile(q) - true) <= 2.0 ** (sketch.shift - 23) * abs(true) + 1e-6


def test_a_narrow_range_stays_exact():
    values = np.random.default_rng(0).uniform(1.5686, 1.5696, 100_000).astype(np.float32)
    sketch = Sketch()
    sketch.add(values)
    assert sketch.exact  # the range holds about 8400 floats
    assert sketch.quantile(0.01) == pytest.approx(np.quantile(values.astype(np.float64), 0.01), abs=1e-12)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 6), st.randoms())
def test_merging_does_not_depend_on_order_or_partition(seed, parts, random):
    """Also when the sketch is past its capacity: the result is a function of the values alone."""
    values = np.random.default_rng(seed).normal(0, 1, 3000).astype(np.float32)
    whole = Sketch(capacity=256)
    whole.add(values)
    pieces = []
    for piece in np.array_split(values, parts):
        pieces.append(Sketch(capacity=256))
        pieces[-1].add(piece)
    random.shuffle(pieces)
    merged = pieces[0]
    for piece in pieces[1:]:
        merged.merge(piece)
    assert merged.shift == whole.shift
    assert np.array_equal(merged.keys, whole.keys) and np.array_equal(merged.counts, whole.counts)


def test_merged_halves_have_the_pooled_quantiles():
    """20 episodes around centres from -2 to 2: averaged quantiles would lie near ±0.2, the true ones near ±2.1."""
    rng = np.random.default_rng(0)
    episodes = [rng.normal(mu, 0.1, (300, 2)) for mu in np.linspace(-2, 2, 20)]
    pooled = np.concatenate(episodes)

    def accumulate(parts):
        made = Accumulator((2,))
        for part in parts:
            made.add(part)
        return made

    first, second = accumulate(episodes[:7]), accumulate(episodes[7:])
    first.merge(second)
    got, whole = first.result(), accumulate(episodes).result()
    averaged = np.mean([np.quantile(e, 0.99, axis=0) for e in episodes], axis=0)
    assert (averaged < 0.5).all()
    for name, q in (("q01", 0.01), ("q99", 0.99)):
        np.testing.assert_allclose(got[name], np.quantile(pooled.astype(np.float32), q, axis=0), rtol=1e-5)
        np.testing.assert_array_equal(got[name], whole[name])
    np.testing.assert_allclose(got["mean"], pooled.mean(0), rtol=1e-10)
    np.testing.assert_allclose(got["std"], pooled.std(0), rtol=1e-10)
    assert (got["count"] == 6000).all()
    with pytest.raises(UserError, match="cannot be merged"):
        first.merge(Accumulator((3,)))


# -------------------------------------------------------------------------------------------- after the transform


def test_absolute_statistics():
    actions, states = walks(0), walks(1, dims=4)
    got = compute(Table(actions, states), StatisticsSpec(horizon=16))
    for key, rows in (("action", np.concatenate(actions)), ("observation.state", np.concatenate(states))):
        rows = rows.astype(np.float64)
        for name, value in (
            ("mean", rows.mean(0)), ("std", rows.std(0)), ("min", rows.min(0)), ("max", rows.max(0)),
            ("q01", np.quantile(rows, 0.01, axis=0)), ("q99", np.quantile(rows, 0.99, axis=0)),
        ):  # fmt: skip
            np.testing.assert_allclose(got[key][name], value, rtol=1e-6, atol=1e-9, err_msg=f"{key} {name}")


@pytest.mark.parametrize("mode", ["relative", "delta"])
@pytest.mark.parametrize("per_step", [True, False])
def test_chunk_statistics_are_those_of_what_is_trained_on(mode, per_step):
    actions, states, horizon = walks(0), walks(1), 6
    transform = ActionTransform(mode, keep=(2,))
    per: list[list[np.ndarray]] = [[] for _ in range(horizon)]
    for action, state in zip(actions, states):  # by hand: every chunk, valid steps only
        for t in range(len(action)):
            chunk = transform.apply(action[t : t + horizon], state[t])
            for h, row in enumerate(chunk):
                per[h].append(row)
    got = compute(Table(actions, states), StatisticsSpec(transform, horizon, per_step))["action"]
    if per_step:
        assert got["q99"].shape == (horizon, 3)
        expected = [np.stack(rows).astype(np.float64) for rows in per]
        np.testing.assert_allclose(got["q01"], [np.quantile(r, 0.01, axis=0) for r in expected], rtol=1e-6)
        np.testing.assert_allclose(got["std"], [r.std(0) for r in expected], rtol=1e-6)
        assert got["count"][:, 0].tolist() == [74, 71, 68, 65, 62, 59]
    else:
        pooled = np.concatenate([np.stack(rows) for rows in per]).astype(np.float64)
        np.testing.assert_allclose(got["q99"], np.quantile(pooled, 0.99, axis=0), rtol=1e-6)


def test_sample_rows_are_what_the_statistics_are_of():
    table = Table(walks(0), walks(1))
    spec = StatisticsSpec(ActionTransform("relative"), 4)
    rows, stats = sample_rows(table, spec), compute(table, spec)
    assert rows["action"].shape == (74 - 3 * 3, 4, 3)
    assert (rows["action"].max(0) <= stats["action"]["max"] + 1e-6).all()
    assert len(sample_rows(table, StatisticsSpec(), limit=30)["observation.state"]) < 74


def test_nan_names_the_episode():
    actions = walks(0)
    actions[1][3, 2] = np.nan
    with pytest.raises(UserError, match=r"'action' of episode 1 holds nan at frame 3, dimension 2"):
        compute(Table(actions), StatisticsSpec())


# ------------------------------------------------------------------------------------------------------ choice


def test_the_datasets_own_are_used_when_they_agree():
    actions, states = walks(0), walks(1)
    true = compute(Table(actions, states), StatisticsSpec())
    no_cache = {"compute_with": lambda d, s: Computed(compute(d, s), "computed")}

    def origin(stored, spec=None, **more):
        return statistics_of(Table(actions, states, stored), spec or StatisticsSpec(), **no_cache, **more)

    own = {key: {n: v + 1e-4 * (n == "mean") for n, v in stats.items()} for key, stats in true.items()}
    used = origin(own)
    assert used.origin.startswith("stored in the dataset")
    np.testing.assert_array_equal(used.values["action"]["mean"], own["action"]["mean"])
    assert "carries none" in origin(None).origin
    assert "absolute actions, not 'relative'" in origin(own, StatisticsSpec(ActionTransform("relative"), 4)).origin
    lacking = {key: {n: v for n, v in s.items() if n not in ("q01", "q99")} for key, s in own.items()}
    assert "lack q01, q99" in origin(lacking).origin
    needed = dict.fromkeys(own, ("mean", "std"))
    assert origin(lacking, needed=needed).origin.startswith("stored")
    wrong = {**own, "action": {**own["action"], "q99": own["action"]["q99"] * 0.3}}
    rejected = origin(wrong)
    assert "disagree with its data: q99 of 'action'" in rejected.origin
    np.testing.assert_array_equal(rejected.values["action"]["q99"], true["action"]["q99"])


def test_quantiles_that_the_bundled_dataset_carries_are_averages_and_are_not_used(metaworld, tmp_path, monkeypatch):
    """LeRobot's aggregate gives the ±1 gripper q01 = q99 = 0.21."""
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path))
    dataset = open_dataset(metaworld)
    stored = dataset.stored_statistics()["action"]
    assert stored["q01"][3] == stored["q99"][3]
    used = statistics_of(dataset, StatisticsSpec())
    assert "disagree" in used.origin
    assert used.values["action"]["q01"][3] == -1 and used.values["action"]["q99"][3] == 1
    mean = statistics_of(dataset, StatisticsSpec(), dict.fromkeys(used.values, ("mean", "std", "min", "max")))
    assert mean.origin.startswith("stored in the dataset")
    some = statistics_of(open_dataset(metaworld, episodes=[0, 1]), StatisticsSpec(), {"action": ("mean", "std")})
    assert "in the selected episodes" in some.origin


# ------------------------------------------------------------------------------------------------------- cache


def test_cache_follows_what_made_it(tmp_path):
    actions, states = walks(0), walks(1)
    spec = StatisticsSpec(ActionTransform("relative"), 4)

    def reads(spec=spec, name="a", episodes=slice(None)) -> int:
        table = Table(actions, states, name=name)
        table.episodes = table.episodes[episodes]
        cached(table, spec, tmp_path)
        return table.reads

    assert reads() > 0 and reads() == 0
    for change in (
        {"spec": StatisticsSpec(ActionTransform("delta"), 4)},
        {"spec": StatisticsSpec(ActionTransform("relative", keep=(1,)), 4)},
        {"spec": StatisticsSpec(ActionTransform("relative"), 5)},
        {"spec": StatisticsSpec(ActionTransform("relative"), 4, per_step=False)},
        {"name": "b"},
        {"episodes": slice(0, 2)},
    ):
        assert reads(**change) > 0, change
        assert reads(**change) == 0, change
    assert len(list(tmp_path.iterdir())) == 7
    absolute = StatisticsSpec(horizon=4), StatisticsSpec(horizon=9)
    assert reads(absolute[0]) > 0 and reads(absolute[1]) == 0  # absolute statistics know no horizon


def test_cached_values_are_exact_and_a_torn_file_is_computed_again(tmp_path):
    table = Table(walks(0), walks(1))
    first, second = (cached(table, StatisticsSpec(), tmp_path) for _ in range(2))
    assert "earlier" in second.origin
    for key, stats in first.values.items():
        for name, value in stats.items():
            np.testing.assert_array_equal(second.values[key][name], value)
    modes = {"action": "q99", "state": "mean_std"}
    hashes = {NormalizerSet.from_statistics(made.values, modes).hash for made in (first, second)}
    assert len(hashes) == 1
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:100])
    assert "earlier" not in cached(table, StatisticsSpec(), tmp_path).origin
    assert json.loads(file.read_text())


def test_a_dataset_that_moved_keeps_its_cache_and_another_in_its_place_has_its_own(metaworld, tmp_path, damage):
    here, there, cache = tmp_path / "here", tmp_path / "there", tmp_path / "cache"

    def taken(path):
        return cached(open_dataset(path), StatisticsSpec(), cache)

    shutil.copytree(metaworld, here)
    first = taken(here)
    here.rename(there)
    assert "earlier" in taken(there).origin
    shutil.copytree(there, here)
    damage.table(here / "data/chunk-000/file-000.parquet", "action", lambda rows: -rows)
    other = taken(here)
    assert "earlier" not in other.origin
    np.testing.assert_allclose(other.values["action"]["mean"], -first.values["action"]["mean"], rtol=1e-6)


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path):
    (tmp_path / "file").write_text("")
    made = cached(Table(walks(0)), StatisticsSpec(), tmp_path / "file" / "below")
    assert "cannot be written" in made.origin and "action" in made.values


def _compute_together(barrier, results, folder: Path) -> None:
    barrier.wait(30)
    results.put(to_json(cached(Table(walks(0), walks(1)), StatisticsSpec(), folder).values))


def test_two_processes_at_once_leave_one_whole_file(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=_compute_together, args=(barrier, results, tmp_path)) for _ in range(2)]
    for process in both:
        process.start()
    printed = {results.get(timeout=300) for _ in both}
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    (file,) = tmp_path.iterdir()
    assert printed == {file.read_text()}


def test_cache_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("VLAFORGE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vlaforge"
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_nothing_is_written_into_the_dataset(metaworld, tmp_path, monkeypatch):
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path))
    before = {p: p.stat().st_mtime_ns for p in metaworld.rglob("*")}
    statistics_of(open_dataset(metaworld), StatisticsSpec(ActionTransform("delta"), 8))
    assert {p: p.stat().st_mtime_ns for p in metaworld.rglob("*")} == before


def test_float_order_of_the_sketch():
    values = np.array([-3e38, -1.5, -1e-40, 0.0, 1e-40, 2.0, 3e38], np.float32)
    ranks = []
    for value in values:
        sketch = Sketch()
        sketch.add(np.array([value]))
        ranks.append(int(sketch.keys[0]))
        assert sketch.quantile(0.5) == pytest.approx(float(value), rel=1e-6, abs=1e-44)
    assert all(a < b for a, b in pairwise(ranks))
