"""Synthetic data for any family, from nothing but its contract (``--dataset-format dummy_datasets``).

Sample i of every epoch, rank and worker count is the same batch row: it goes through the same loader,
sampler, collate and draws as real data, so a run without a dataset exercises everything but the readers and
the family's processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from vlaforge.data.dataset import Dataset, DatasetInfo, Episode
from vlaforge.data.errors import UserError
from vlaforge.data.schema import Contract, DataNeeds, Sample


class DummyDataset(Dataset):
    """`num_samples` rows that hold only their own number, in episodes of `episode_length`."""

    def __init__(self, num_samples: int = 100, episode_length: int = 50):
        if num_samples < 1 or episode_length < 1:
            raise UserError(f"Synthetic data needs at least one sample, not {num_samples} (--num-samples).")
        self.num_samples = num_samples
        self.info = DatasetInfo(Path("dummy"), "dummy_datasets", "1", 30.0, {}, 0, 0)
        starts = range(0, num_samples, episode_length)
        self.episodes = [
            Episode(i, min(episode_length, num_samples - start), start, ("synthetic task",))
            for i, start in enumerate(starts)
        ]

    def get(self, position: int, needs: DataNeeds) -> Sample:
        episode, frame = self.locate(position)
        return {
            "task": episode.tasks[0],
            "task_index": 0,
            "episode_index": episode.index,
            "frame_index": frame,
            "index": position,
            "dataset_index": 0,
            "timestamp": frame / self.info.fps,
        }

    def column(self, key: str, episode: Episode) -> np.ndarray:
        raise UserError(f"Synthetic data has no column '{key}'.")

    def fingerprint(self) -> str:
        return f"dummy-{self.num_samples}"


class DummyProcessing:
    """In place of a family's `Processing`: the fields of row i are the contract's synthetic row i."""

    def __init__(self, contract: Contract):
        self.contract = contract

    def needs(self) -> DataNeeds:
        return DataNeeds()

    def sample(self, sample: Mapping, rng: np.random.Generator, training: bool) -> dict[str, np.ndarray]:
        row = self.contract.synthetic(1, seed=int(sample["index"]))
        return {name: _numpy(value[0]) for name, value in row.items()}


def _numpy(value: torch.Tensor) -> np.ndarray:
    if value.dtype == torch.bfloat16:
        raise UserError(
            "A contract field is bfloat16; fields reach the loader as float32 and are cast on the device."
        )
    return value.numpy()
