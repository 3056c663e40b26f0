"""The open-loop check: which frames, which errors, which yardstick; and that a perfect policy has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import ACTION, Contract, DataNeeds, DrawSpec, Field
from vlaforge.runtime.openloop import OpenLoop, Prediction, chunk_starts, mean_absolute, summary, table
from vlaforge.runtime.session import load_prediction, save_prediction

HORIZON = 8


class Replay(nn.Module):
    """A policy that answers with the recorded actions in its batch, plus `off`; the noise counts for nothing."""

    def __init__(self, off: float = 0.0):
        super().__init__()
        self.off, self.modes, self.noise = off, [], []

    def act(self, obs, draw, steps):
        self.modes.append(self.training)
        self.noise.append(draw["noise"])
        return obs["recorded"] / 2 + self.off / 2


class Halved:
    """Model units are half of the robot's, and the model has one dimension more than the robot."""

    def needs(self) -> DataNeeds:
        return DataNeeds(action_offsets=tuple(range(HORIZON)))

    def sample(self, sample, rng, training):
        assert not training
        return {"recorded": np.pad(sample[ACTION], ((0, 0), (0, 1))).astype(np.float32)}

    def actions(self, x_HA, sample=None):
        return x_HA * 2


@pytest.fixture(scope="module")
def held_out(metaworld):
    return open_dataset(metaworld, episodes=[1, 4], video_backend="pyav")


@pytest.fixture(scope="module")
def check(held_out):
    contract = Contract(
        {"recorded": Field((HORIZON, 5), torch.float32, "HA")}, {"noise": DrawSpec((HORIZON, 5), "normal")}
    )
    return OpenLoop(held_out, Halved(), contract, np.full(4, 0.25, np.float32), seed=3, steps=2, batch_size=3)


def test_a_policy_that_repeats_the_recording_has_no_error(check):
    model = Replay().train()
    prediction = check.predict(model, "cpu")
    assert prediction.errors().shape == (4,) and np.allclose(prediction.errors(), 0)
    assert model.training and not any(model.modes)


def test_an_offset_is_the_error_in_robot_units(check):
    assert np.allclose(check.predict(Replay(0.5), "cpu").errors(), 0.5, atol=1e-6)


def test_every_frame_is_compared_once_and_padding_never(check, held_out):
    prediction = check.predict(Replay(), "cpu")
    assert prediction.valid_NH.sum() == len(held_out)
    places = [(e.index, frame) for e in held_out.episodes for frame in range(0, e.length, HORIZON)]
    assert list(prediction.places) == places
    recorded = np.concatenate([held_out.column(ACTION, episode) for episode in held_out.episodes])
    assert np.array_equal(prediction.recorded_NHA[prediction.valid_NH], recorded)
    garbage = prediction.predicted_NHA.copy()
    garbage[~prediction.valid_NH] = 1e6
    assert np.array_equal(mean_absolute(garbage, prediction.recorded_NHA, prediction.valid_NH), prediction.errors())


def test_the_same_noise_each_time(check):
    first, second = Replay(), Replay()
    check.predict(first, "cpu"), check.predict(second, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(first.noise, second.noise))


def test_the_yardstick_repeats_the_mean_action(check, held_out):
    recorded = np.concatenate([held_out.column(ACTION, episode) for episode in held_out.episodes])
    expected = np.abs(recorded.astype(np.float64) - 0.25).mean(0)
    assert np.allclose(check.baseline(check.predict(Replay(), "cpu")), expected, atol=1e-7)


def test_chunks_are_thinned_evenly(held_out):
    starts = chunk_starts(held_out, 1, 10)
    assert len(starts) == 10 and starts[0] == 0 and starts[-1] == len(held_out) - 1
    assert np.ptp(np.diff(starts)) <= 1


def test_summary_and_table(check):
    before, after = check.predict(Replay(1.0), "cpu"), check.predict(Replay(0.25), "cpu")
    result = summary(check, ["x", "y", "z", "g"], before, after, {"steps": 3})
    assert result["trained_over_untrained"] == pytest.approx(0.25, rel=1e-5)
    assert result["trained"]["per_dimension"]["z"] == pytest.approx(0.25, abs=1e-6)
    assert result["episodes"] == [1, 4] and result["conditions"] == {"steps": 3}
    lines = table(result)
    assert len(lines) == 6 and "untrained" in lines[0] and lines[-1].split()[-3:-1] == ["1.0000", "0.2500"]
    assert "untrained" not in summary(check, ["x", "y", "z", "g"], None, after, {})


def test_a_prediction_survives_a_restart(check, tmp_path):
    prediction = check.predict(Replay(0.5), "cpu")
    save_prediction(prediction, tmp_path / "openloop.npz")
    again = load_prediction(tmp_path / "openloop.npz")
    assert isinstance(again, Prediction) and again.places == prediction.places
    assert np.array_equal(again.errors(), prediction.errors())
