"""Mixtures through the reader, the loader and the normalisers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.data.loader import build_loader
from vlaforge.data.mixture import ROWS, Mixture, Part
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.prepare import prepare
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import Contract, DataConfig, DataNeeds, Field
from vlaforge.data.statistics import StatisticsSpec, compute

CONTRACT = Contract({"action": Field((2, 4), torch.float32, "HA"), "which": Field((), torch.int64, "")}, {})


class Processing:
    def __init__(self, normalizers: NormalizerSet):
        self.normalizers = normalizers

    def needs(self) -> DataNeeds:
        return DataNeeds(action_offsets=(0, 1), cameras=())

    def sample(self, sample, rng, training):
        action = self.normalizers.normalize("action", sample["action"], sample["embodiment"])
        return {"action": action, "which": np.asarray(sample["dataset_index"], np.int64)}


def written(folder: Path, text: str) -> Path:
    path = folder / "mixture.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def mixture(metaworld, tmp_path) -> Mixture:
    text = f"""
    datasets:
      - {{path: {metaworld}, weight: 3, embodiment: left, episodes: "0:2"}}
      - {{path: {metaworld}, weight: 1, embodiment: right, episodes: [4]}}
    """
    return open_dataset(written(tmp_path, text))


def normalizers(mixture: Mixture) -> NormalizerSet:
    return mixture.normalizers(
        lambda dataset: NormalizerSet.from_statistics(compute(dataset, StatisticsSpec()), {"action": "min_max"})
    )


def test_samples_are_those_of_the_parts_with_ids_of_their_own(mixture):
    left, right = (part.dataset for part in mixture.parts)
    assert len(mixture) == len(left) + len(right)
    assert mixture.embodiments == ("left", "right") and left.embodiments == ("",)
    needs = DataNeeds(cameras=("wrist",))
    got = mixture.get_many([3, len(left) + 5, 0], needs)
    for sample, (part, position) in zip(got, [(left, 3), (right, 5), (left, 0)]):
        alone = part.get(position, needs)
        assert all(np.array_equal(sample[key], alone[key]) for key in alone if key != "dataset_index")
    assert [s["embodiment"] for s in got] == ["left", "right", "left"]
    assert mixture.row_id(len(left) + 5) == ROWS + right.row_id(5)
    episode = mixture.episodes[-1]
    assert np.array_equal(mixture.column("action", episode), right.column("action", right.episodes[0]))


def test_each_dataset_is_normalised_by_its_own_statistics(mixture):
    made = normalizers(mixture)
    left, right = (part.dataset.get(0, DataNeeds(cameras=())) for part in mixture.parts)
    assert set(made.entries) == {"left", "right"}
    for sample, name in ((left, "left"), (right, "right")):
        stats = compute(mixture.parts[name == "right"].dataset, StatisticsSpec())["action"]
        moving = stats["max"] > stats["min"]
        low, high = stats["min"][moving], stats["max"][moving]
        got = made.normalize("action", sample["action"], name)[:, moving]
        np.testing.assert_allclose(got, 2 * (sample["action"][:, moving] - low) / (high - low) - 1, atol=1e-6)


def test_loader_draws_by_weight_and_resumes(mixture):
    def source(**more):
        return build_loader(mixture, Processing(normalizers(mixture)), CONTRACT, batch_size=8, seed=2, **more)

    whole = source()
    batches = [next(whole) for _ in range(20)]
    share = np.mean(torch.cat([m.batch["which"] for m in batches]).numpy() == 0)
    assert 0.68 < share < 0.82
    first = source()
    for _ in range(9):
        next(first)
    second = source(num_workers=1, multiprocessing_context="fork")
    second.load_state_dict(first.state_dict())
    with second:
        rest = [next(second) for _ in range(11)]
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(rest, batches[9:]))
    assert all(torch.equal(a.batch["action"], b.batch["action"]) for a, b in zip(rest, batches[9:]))
    with pytest.raises(UserError, match="cannot be streamed"):
        source(streaming=True)


def test_a_camera_that_a_part_lacks_is_left_out(mixture):
    info = mixture.parts[1].dataset.info
    object.__setattr__(info, "cameras", {"scene": info.cameras["scene"]})
    got = mixture.get_many([0, len(mixture) - 1], DataNeeds(cameras=("scene", "wrist")))
    assert "observation.images.wrist" in got[0] and "observation.images.wrist" not in got[1]


def test_parts_may_have_other_formats_and_rows_that_start_no_sample(v21, agilex, robomimic, tmp_path):
    text = f"""
    datasets:
      - {{path: {agilex}, embodiment: two_arms}}
      - {{path: {v21}, embodiment: arm, episodes: "3:5"}}
      - {{path: {robomimic}, embodiment: sim, split: all, state_key: obs/ee_pos}}
    """
    mixture = open_dataset(written(tmp_path, text))
    parts = [part.dataset for part in mixture.parts]
    assert [len(part) for part in parts] == [44, 133, 169] and len(mixture) == mixture.ends[-1] == 44 + 133 + 169
    assert [part.info.state_dim for part in parts] == [20, 4, 3]
    positions = list(range(len(mixture)))
    ids = [mixture.row_id(position) for position in positions]
    assert len(set(ids)) == len(ids)
    for position in (0, 43, 44, 176, 177, 345):
        sample, (episode, frame) = mixture.get(position, DataNeeds(cameras=())), mixture.locate(position)
        assert sample["frame_index"] == frame and sample["index"] == ids[position] % ROWS
        assert episode.index // ROWS == sample["dataset_index"]
    assert mixture.tasks() == list(dict.fromkeys(mixture.get(p, DataNeeds(cameras=()))["task"] for p in positions))
    costs = mixture.costs()
    assert costs.shape == (len(mixture),) and costs[0] > 3 * 256 > costs[44] > 2 * 256
    ranks = [
        build_loader(mixture, Ids(), EMPTY, batch_size=4, rank=rank, world=2, sampler="balanced", epochs=1)
        for rank in range(2)
    ]
    seen = [row for rank in ranks for minibatch in rank for row in minibatch.ids.tolist()]
    assert sorted(seen) == sorted(ids)
    streamed = build_loader(parts[0], Ids(), EMPTY, batch_size=4, streaming=True, epochs=1)
    seen = [row for minibatch in streamed for row in minibatch.ids.tolist()]
    assert sorted(seen) == [parts[0].row_id(position) for position in range(44)]


EMPTY = Contract({"frame": Field((), torch.int64, "")}, {})


class Ids:
    """Passes the frame's number on."""

    def needs(self) -> DataNeeds:
        return DataNeeds(cameras=())

    def sample(self, sample, rng, training):
        return {"frame": np.asarray(sample["frame_index"], np.int64)}


def test_without_weights_every_sample_comes_once(mixture):
    free = Mixture([Part(part.dataset, None, part.embodiment) for part in mixture.parts])
    positions, _ = free.order(0).slice(0, 0, len(free))
    assert Counter(positions.tolist()) == Counter(range(len(free)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: 3", "describes no mixture"),
        ("sets: []", "describes no mixture"),
        ("datasets: []", "at least one dataset"),
        ("datasets: [{path: /none/here, weigth: 2}]", "did you mean 'weight'"),
        ("datasets: [{weight: 2}]", "has no path"),
        ("datasets: [{path: /none/here, weight: much}]", "must be a number"),
        ("datasets: [{path: /none/here}]", "does not exist"),
    ],
)
def test_faulty_descriptions_are_said(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        open_dataset(written(tmp_path, text))


def test_faulty_parts_are_said(mixture):
    a, b = (part.dataset for part in mixture.parts)
    with pytest.raises(UserError, match="above 0"):
        Mixture([Part(a, 0.0, "x"), Part(b, 1.0, "y")])
    with pytest.raises(UserError, match="or none"):
        Mixture([Part(a, 1.0, "x"), Part(b, None, "y")])
    with pytest.raises(UserError, match="its own name"):
        normalizers(Mixture([Part(a, 1.0, "x"), Part(b, 2.0, "x")]))


def test_held_out_episodes_come_from_the_last_part(mixture, tmp_path):
    numbers = [episode.index for episode in mixture.episodes]
    path = tmp_path / "mixture.yaml"
    held, kept = open_dataset(path, episodes=numbers[-1:]), open_dataset(path, episodes=numbers[:-1])
    assert [part.embodiment for part in held.parts] == ["right"] and len(held) == len(mixture.parts[1].dataset)
    assert [part.embodiment for part in kept.parts] == ["left"] and len(kept) == len(mixture.parts[0].dataset)
    with pytest.raises(UserError, match="dataset by dataset"):
        open_dataset(path, episodes="0:2")


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_prepared_normalisers_and_table(mixture, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path))
    made = prepare(mixture, DataConfig(action_mode=mode, normalization_mode="min_max"), horizon=4)
    assert set(made.normalizers.entries) == {"left", "right"}
    assert [row.key for row in made.rows] == ["left action"] * 4 + ["left state"] * 4 + ["right action"] * 4 + [
        "right state"
    ] * 4
    assert all(row.worst <= 1.0001 and row.outside <= 0.001 for row in made.rows)
    assert made.normalizers.get("action", "left").a.shape == ((4, 4) if mode == "relative" else (4,))
    assert made.statistics.origin.startswith("left: ")
