"""Open-loop check: recorded actions beside those that the model predicts from the same frames.

Held-out episodes are cut into chunks of the model's horizon; from each chunk's first frame the model predicts
the whole chunk, without ever seeing its own result. Errors are mean absolute differences in the robot's own
units, per action dimension; the yardstick is a policy that always repeats the mean training action.

Legend: N chunks, H horizon, A action dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlaforge.data.collate import collate
from vlaforge.data.dataset import Dataset
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, Contract, make_draw, sample_rng

MAX_CHUNKS = 48
"""Chunks looked at in one evaluation, spread evenly over the held-out episodes."""


@dataclass(frozen=True)
class Prediction:
    """Recorded and predicted, float32 [N, H, A] in robot units; `valid_NH` is False past an episode's end.

    `places` are (episode, first frame) of each chunk.
    """

    places: tuple[tuple[int, int], ...]
    recorded_NHA: np.ndarray
    predicted_NHA: np.ndarray
    valid_NH: np.ndarray

    def errors(self) -> np.ndarray:
        """Mean absolute difference per dimension [A] over valid steps."""
        return mean_absolute(self.predicted_NHA, self.recorded_NHA, self.valid_NH)


def mean_absolute(x_NHA: np.ndarray, y_NHA: np.ndarray, valid_NH: np.ndarray) -> np.ndarray:
    """Mean of |x - y| over valid steps, float64 [A]."""
    return np.abs(x_NHA.astype(np.float64) - y_NHA)[valid_NH].mean(axis=0)


class OpenLoop:
    """Evaluates one model on the held-out episodes, any number of times, always on the same frames and noise.

    Args:
        dataset: the held-out episodes.
        processing, contract: of the family; `processing.actions` takes predictions back to robot units.
        mean_action_A: of the training episodes, in robot units.
        steps: denoising steps of `act`.
        batch_size: chunks predicted at once.
    """

    def __init__(
        self,
        dataset: Dataset,
        processing: Any,
        contract: Contract,
        mean_action_A: np.ndarray,
        *,
        seed: int,
        steps: int,
        batch_size: int = 8,
    ):
        self.dataset, self.processing, self.contract = dataset, processing, contract
        self.mean_action_A, self.seed, self.steps, self.batch_size = mean_action_A, seed, steps, batch_size
        self.needs = processing.needs()
        self.horizon = len(self.needs.action_offsets)
        self.positions = chunk_starts(dataset, self.horizon, MAX_CHUNKS)

    @torch.no_grad()
    def predict(self, model: torch.nn.Module, device: torch.device | str) -> Prediction:
        """Runs `model.act` on every chunk; the model's mode is restored afterwards."""
        was_training = model.training
        model.eval()
        recorded, predicted, valid = [], [], []
        try:
            for start in range(0, len(self.positions), self.batch_size):
                samples = [
                    self.dataset.get(p, self.needs) for p in self.positions[start : start + self.batch_size]
                ]
                actions_BHA = self._act(model, samples, device)
                for sample, action_HA in zip(samples, actions_BHA):
                    recorded.append(np.asarray(sample[ACTION], np.float32))
                    predicted.append(np.asarray(self.processing.actions(action_HA, sample), np.float32))
                    valid.append(~np.asarray(sample[ACTION_IS_PAD], bool))
        finally:
            model.train(was_training)
        places = tuple((episode.index, frame) for episode, frame in map(self.dataset.locate, self.positions))
        width = self.mean_action_A.shape[-1]
        cut = [action[: len(wanted), :width] for action, wanted in zip(predicted, recorded)]
        return Prediction(places, np.stack(recorded), np.stack(cut), np.stack(valid))

    def _act(
        self, model: torch.nn.Module, samples: Sequence[Mapping], device: torch.device | str
    ) -> np.ndarray:
        rows = [int(sample["index"]) for sample in samples]
        fields = [
            self.processing.sample(sample, sample_rng(self.seed, 0, row, "openloop"), False)
            for sample, row in zip(samples, rows)
        ]
        batch = collate(fields, self.contract, trim=False).to(device)
        draw = make_draw(self.contract.draws, rows, seed=self.seed, epoch=0).to(device)
        with torch.compiler.set_stance(
            "force_eager"
        ):  # shapes differ from training's: compiling them is not worth it
            return model.act(batch, draw, self.steps).float().cpu().numpy()

    def baseline(self, prediction: Prediction) -> np.ndarray:
        """Error [A] of repeating the mean training action on the same chunks."""
        mean_NHA = np.broadcast_to(self.mean_action_A, prediction.recorded_NHA.shape)
        return mean_absolute(mean_NHA, prediction.recorded_NHA, prediction.valid_NH)


def chunk_starts(dataset: Dataset, horizon: int, limit: int) -> list[int]:
    """Positions at which chunks start: every `horizon` frames of each episode, thinned evenly to `limit`."""
    starts, first = [], 0
    for episode in dataset.episodes:
        starts += range(first, first + episode.length, horizon)
        first += episode.length
    if len(starts) > limit:
        starts = [starts[i] for i in np.linspace(0, len(starts) - 1, limit).round().astype(int)]
    return starts


def summary(
    check: OpenLoop,
    names: Sequence[str],
    before: Prediction | None,
    after: Prediction,
    conditions: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of openloop.json: errors per dimension and their mean, for each of the policies."""

    def entry(errors_A: np.ndarray) -> dict[str, Any]:
        return {"error": float(errors_A.mean()), "per_dimension": dict(zip(names, errors_A.tolist()))}

    result: dict[str, Any] = {
        "what": "mean absolute error of predicted actions against recorded ones, in the robot's units",
        "episodes": sorted({episode for episode, _ in after.places}),
        "chunks": len(after.places),
        "horizon": check.horizon,
        "frames": int(after.valid_NH.sum()),
        "conditions": dict(conditions),
        "trained": entry(after.errors()),
        "mean_action": entry(check.baseline(after)),
    }
    if before is not None:
        result["untrained"] = entry(before.errors())
        result["trained_over_untrained"] = result["trained"]["error"] / result["untrained"]["error"]
    result["trained_over_mean_action"] = result["trained"]["error"] / result["mean_action"]["error"]
    return result


def table(result: Mapping[str, Any]) -> list[str]:
    """The numbers of `summary` as text lines."""
    columns = [name for name in ("untrained", "trained", "mean_action") if name in result]
    names = list(result["trained"]["per_dimension"])
    width = max([len("mean of all"), *map(len, names)])
    lines = [" " * width + "".join(f"{column.replace('_', ' '):>14}" for column in columns)]
    for name in names:
        lines.append(
            name.ljust(width) + "".join(f"{result[c]['per_dimension'][name]:14.4f}" for c in columns)
        )
    lines.append("mean of all".ljust(width) + "".join(f"{result[c]['error']:14.4f}" for c in columns))
    return lines


def save_json(result: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
