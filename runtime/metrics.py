"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard, Weights & Biases; and how they get off the
device.

``metrics.jsonl`` has one object a logged step:

    step              completed optimiser steps, from 1
    loss, loss/<term> global masked means of that step
    grad_norm, lr     and <name>/<group> where there are several parameter groups
    skipped, nonfinite, spikes, in_a_row, overflows   refused steps so far (`guards`)
    samples, epoch    samples consumed so far, from the loader's own count; epochs they are
    samples_per_s, tokens_per_s, step_time_s, data_wait, mfu   since the last logged step (`meter`)
    memory_gib        peak so far: of the device, or of the process on a CPU
    time/<stage>      milliseconds, on steps of --detail-log-interval
    eval_...          on steps of --eval-interval

A value that is not finite is written as null. After a resume, rows of steps that are taken again are gone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vlaforge.data.errors import UserError

Row = Mapping[str, float | int]


class Backend(Protocol):
    """Takes the rows of a run."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """``metrics.jsonl``: rows are on the disk when `write` returns to the operating system, one line each.

    Args:
        path: of the file.
        completed: steps that lie behind; rows beyond them are stale and removed.
    """

    def __init__(self, path: Path, completed: int = 0):
        kept = [line for line, step in _rows(path) if step <= completed]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(fresh, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps({key: _json(value) for key, value in row.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows(path: Path) -> Iterator[tuple[str, int]]:
    """Lines that are whole, with their step."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield line, int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue


def _json(value: float | int) -> float | int | None:
    return value if not isinstance(value, float) or math.isfinite(value) else None


class TensorBoard:
    """Scalars in a TensorBoard folder; `queue` events are held before the writer blocks."""

    def __init__(self, folder: Path, queue: int = 1000, completed: int = 0):
        from torch.utils.tensorboard import SummaryWriter

        # rows of a run that died after its last checkpoint are hidden from this step on
        purge = completed + 1 if completed else None
        self._writer = SummaryWriter(str(folder), max_queue=queue, purge_step=purge)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A Weights & Biases run. Its id stays in the output folder, so that a resumed run continues it."""

    def __init__(self, folder: Path, project: str, mode: str, config: Mapping[str, Any], resumed: bool):
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "--wandb-mode needs Weights & Biases, which is not installed: pip install 'vlaforge[wandb]'."
            ) from error
        note = folder / "wandb_id.txt"
        known = note.read_text().strip() if resumed and note.is_file() else None
        self._run = wandb.init(
            project=project,
            name=folder.resolve().name,
            id=known,
            resume="allow" if known else None,
            mode=mode,
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(silent=True),
        )
        note.write_text(self._run.id + "\n")

    def write(self, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class Log:
    """All backends of a run."""

    def __init__(self, backends: Sequence[Backend]):
        self.backends = list(backends)

    def write(self, row: Row) -> None:
        for backend in self.backends:
            backend.write(row)

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


def open_log(args: Any, folder: Path, config: Mapping[str, Any], completed: int) -> Log:
    """The backends that the flags ask for, writing to `folder`."""
    backends: list[Backend] = [MetricsFile(folder / "metrics.jsonl", completed)]
    if args.tensorboard_dir is not None:
        backends.append(TensorBoard(folder / args.tensorboard_dir, args.tensorboard_queue_size, completed))
    if args.wandb_mode != "disabled":
        backends.append(Wandb(folder, args.wandb_project, args.wandb_mode, config, completed > 0))
    return Log(backends)


class OnTheWay:
    """One step's metrics leaving the device: the copy is queued at once and read when it has arrived."""

    def __init__(self, step: int, metrics: Mapping[str, Tensor], facts: Mapping[str, float]):
        self.step, self.facts, self.names = step, dict(facts), list(metrics)
        stacked = torch.stack([value.to(torch.float64) for value in metrics.values()])
        self._host = stacked
        self._arrived: torch.cuda.Event | None = None
        if stacked.is_cuda:
            self._host = torch.empty_like(stacked, device="cpu", pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def here(self) -> bool:
        """Whether reading does not wait."""
        return self._arrived is None or self._arrived.query()

    def row(self) -> dict[str, float | int]:
        """The whole row; waits for the copy when it is still on its way."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values = {name: _whole(name, value) for name, value in zip(self.names, self._host.tolist())}
        return {"step": self.step, **values, **self.facts}


COUNTS = ("skipped", "nonfinite", "spikes", "in_a_row", "overflows")


def _whole(name: str, value: float) -> float | int:
    return int(value) if name in COUNTS else value
