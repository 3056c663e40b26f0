"""What a run asks of its own process: seeds, determinism, precision of matrix products, garbage, signals."""

from __future__ import annotations

import base64
import fcntl
import gc
import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs


def prepare(args: TrainingArgs, rank: int) -> list[str]:
    """Seeds the global generators and sets the process's switches; returns sentences for the log.

    Noise, times, augmentation and order have generators of their own, by sample: the global ones serve the
    initial weights and whatever a model's libraries draw.
    """
    seed(args.seed + (rank if args.set_seed_by_rank else 0))
    notes = []
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not args.disable_tf32
    if args.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        notes.append("Deterministic mode: operations without a deterministic algorithm raise an error.")
    else:
        torch.use_deterministic_algorithms(False)
    return notes


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the output folder for one run; UserError when another process has it. Its death frees it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another run is writing to '{folder}': wait for it, or choose another --output-dir."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def seed(value: int) -> None:
    """Seeds Python's, NumPy's and torch's global generators."""
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 (libraries draw from it)
    torch.manual_seed(value)


# ---------------------------------------------------------------------------------------- generators


def rng_state() -> dict[str, Any]:
    """The global generators' states as plain values for JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    version, internal, following = random.getstate()
    state = {
        "python": [version, list(internal), following],
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
        "torch": _packed(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _packed(torch.cuda.get_rng_state())
    return state


def load_rng_state(state: Mapping[str, Any]) -> None:
    """Puts the global generators where `rng_state` found them."""
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    torch.set_rng_state(_unpacked(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unpacked(state["cuda"]))


def _packed(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _unpacked(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())


# ---------------------------------------------------------------------------------------- signals


class StopSignal:
    """Remembers SIGTERM and SIGINT for the loop to act on after the step; a second SIGINT interrupts at
    once."""

    def __init__(self) -> None:
        self.name: str | None = None

    @contextmanager
    def watch(self) -> Iterator[StopSignal]:
        """Takes the signals over inside the block. Only the main thread may; others go without."""
        try:
            before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name


# ---------------------------------------------------------------------------------------- garbage


class Garbage:
    """Python's collector: as it is, or with `manual` only when told, so that ranks do not pause at random.

    `interval` steps lie between collections; 0 collects at the start and never again.
    """

    def __init__(self, manual: bool, interval: int):
        self.manual, self.interval = manual, interval

    @contextmanager
    def held(self) -> Iterator[Garbage]:
        if not self.manual:
            yield self
            return
        was_on = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            yield self
        finally:
            if was_on:
                gc.enable()

    def after(self, step: int) -> None:
        """Collects when it is due after `step`."""
        if self.manual and self.interval and step % self.interval == 0:
            gc.collect(1)
