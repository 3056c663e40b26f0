"""What a loader's worker does: reads the samples of one request, processes them and makes one micro-batch.

A fault comes back as a value, not as an exception, so that the main process can say which sample it was.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch

from vlaforge.data.collate import collate
from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError
from vlaforge.data.samplers import Request
from vlaforge.data.schema import Contract, Minibatch, Sample, make_draw, sample_rng


class SampleError(RuntimeError):
    """A sample could not be read or processed; the text names dataset, episode and frame."""


@dataclass(frozen=True)
class Failure:
    """What comes in place of a micro-batch when it cannot be made."""

    message: str
    by_user: bool
    trace: str

    def error(self) -> Exception:
        if self.by_user:
            return UserError(self.message)
        error = SampleError(self.message)
        error.add_note(self.trace)
        return error


class Maker:
    """request → micro-batch; lives in each worker, or in the main process without workers."""

    def __init__(self, dataset: Dataset, processing: Any, contract: Contract, *, seed: int, training: bool, trim: bool):
        self.dataset, self.processing, self.contract = dataset, processing, contract
        self.seed, self.training, self.trim = seed, training, trim
        self.needs = processing.needs()

    def __getitem__(self, request: Request) -> Minibatch | Failure:
        positions, epochs = request.positions.tolist(), request.epochs.tolist()
        rows = [self.dataset.row_id(position) for position in positions]
        samples = self._read(positions)
        if isinstance(samples, Failure):
            return samples
        fields = []
        for position, row, epoch, sample in zip(positions, rows, epochs, samples):
            try:
                rng = sample_rng(self.seed, epoch, row, "augment")
                fields.append(self.processing.sample(sample, rng, self.training))
            except Exception as error:
                return failure(error, self._where(position))
        try:
            batch = collate(fields, self.contract, self.trim)
        except ValueError as error:
            return failure(error, f"a batch that starts with {self._where(positions[0])}")
        draw = make_draw(
            self.contract.draws,
            rows,
            seed=self.seed,
            epoch=epochs,
            step=request.step,
            positions=request.places.tolist(),
            global_batch=request.global_batch,
        )
        return Minibatch(batch, draw, torch.tensor(rows, dtype=torch.int64), epochs[0])

    def _read(self, positions: list[int]) -> list[Sample] | Failure:
        """All samples at once; when that fails, one at a time, to say which it is."""
        try:
            return self.dataset.get_many(positions, self.needs)
        except Exception as whole:
            for position in positions:
                try:
                    self.dataset.get(position, self.needs)
                except Exception as error:
                    return failure(error, self._where(position))
            return failure(whole, f"a batch that starts with {self._where(positions[0])}")

    def _where(self, position: int) -> str:
        episode, frame = self.dataset.locate(position)
        return f"dataset '{self.dataset.info.path}', episode {episode.index}, frame {frame}"


def failure(error: Exception, where: str) -> Failure:
    by_user = isinstance(error, UserError)
    what = str(error) if by_user else f"{type(error).__name__}: {error}"
    return Failure(f"{what} (while reading {where})", by_user, traceback.format_exc())
