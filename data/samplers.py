"""Which samples make up which batch: a pure function of (seed, epoch, cursor).

An *order* lists the dataset positions of each epoch. A `Schedule` cuts it into micro-batches of world ×
batch samples and deals each one out to the ranks. The only state is a `Cursor` of four integers that count
samples over all ranks, so a run resumes at any micro-batch with another number of ranks or workers: what was
consumed is a prefix of the order, and the rest follows.

The end of an epoch, where fewer samples are left than a step needs: with `drop_last` they are left out of
this epoch; otherwise the batch is filled from the start of the next epoch, so each sample is seen once an
epoch, no batch is short and none is repeated. Only a finite schedule (`epochs`) ends with a short batch,
shared evenly by the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import sample_rng

MODES = ("cyclic", "block", "balanced")


class Order(ABC):
    """The positions that each epoch visits."""

    size: int
    """Samples in an epoch."""

    def identity(self) -> dict[str, str | int]:
        """What else must be the same for a cursor to mean the same samples."""
        return {"order": type(self).__name__, "epoch_size": self.size}

    @abstractmethod
    def slice(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, epochs), int64 [stop - start]: places start..stop of `epoch`.

        The second is the epoch that the sample's randomness is keyed by: `epoch` itself, or in a mixture how
        often its own dataset has been gone through.
        """


class Shuffled(Order):
    """All `count` positions once, permuted by (seed, epoch); in order without `shuffle`."""

    def __init__(self, count: int, seed: int = 0, shuffle: bool = True):
        if count < 1:
            raise UserError("The dataset has no samples: no episode is selected, or all of them are empty.")
        self.size, self.seed, self.shuffle = count, seed, shuffle
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def __reduce__(self):
        return Shuffled, (self.size, self.seed, self.shuffle)

    def _permute(self, epoch: int) -> np.ndarray:
        small = np.int32 if self.size < 2**31 else np.int64
        return sample_rng(self.seed, epoch, 0, "order").permutation(np.arange(self.size, dtype=small))

    def slice(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        positions = self._permutation(epoch)[start:stop] if self.shuffle else np.arange(start, stop)
        return positions.astype(np.int64), np.full(stop - start, epoch, np.int64)


@dataclass(frozen=True)
class Cursor:
    """Where a schedule stands: `offset` samples of `epoch` are consumed, `samples` in all, over all ranks;
    `micro` micro-batches of the present step are."""

    epoch: int = 0
    offset: int = 0
    samples: int = 0
    micro: int = 0

    def state(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One micro-batch of one rank.

    Args:
        positions, epochs: int64 [b], of each sample.
        places: int64 [b], its place 0..global_batch-1 in the step's global batch.
        step: a number that only this step of the run has (samples consumed before it).
        global_batch: samples of the step over ranks and micro-batches.
    """

    positions: np.ndarray
    epochs: np.ndarray
    places: np.ndarray
    step: int
    global_batch: int


@dataclass(frozen=True)
class Schedule:
    """Cuts an order into micro-batches and deals them out.

    Args:
        order: what each epoch visits.
        batch_size: samples of a micro-batch of one rank.
        world: number of ranks.
        accumulate: micro-batches of a step.
        mode: who gets what of the world × batch_size samples of a micro-batch. ``cyclic``: rank r every
            world-th;
            ``block``: the r-th run of batch_size; ``balanced``: costliest first, to the rank with the least
            cost so far.
        drop_last, epochs: see the module; `epochs` None never ends.
        costs: float [positions of the dataset], for ``balanced``.
    """

    order: Order
    batch_size: int
    world: int = 1
    accumulate: int = 1
    mode: str = "cyclic"
    drop_last: bool = False
    epochs: int | None = None
    costs: Sequence[float] | np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "world", "accumulate"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.mode not in MODES:
            raise unknown("sampler", self.mode, MODES)
        if self.mode == "balanced" and self.costs is None:
            raise UserError("The balanced sampler needs a cost for each sample, and this dataset states none.")
        if self.drop_last and self.order.size < self.global_batch:
            raise UserError(
                f"A step takes {self.global_batch} samples (batch {self.batch_size} × {self.world} ranks × "
                f"{self.accumulate} accumulated), but an epoch has only {self.order.size}, and short steps "
                f"are dropped: use a smaller batch, or keep the last one."
            )

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world * self.accumulate

    def next(self, at: Cursor, rank: int) -> tuple[Request | None, Cursor]:
        """The micro-batch of `rank` at the cursor, and the cursor behind it. None when a finite schedule has
        ended, or when its last, short batch has no sample for this rank (then the cursor stands at the end).
        """
        positions, epochs, after = self._take(at)
        micro = len(positions) and (at.micro + 1) % self.accumulate
        after = replace(after, micro=micro, samples=at.samples + len(positions))
        mine = self._share(positions, rank)
        if not len(mine):
            return None, after
        segment = self.batch_size * self.world
        places = at.micro * segment + mine
        step = at.samples - at.micro * segment
        return Request(positions[mine], epochs[mine], places, step, self.global_batch), after

    def _take(self, at: Cursor) -> tuple[np.ndarray, np.ndarray, Cursor]:
        """The samples of all ranks at the cursor, over the end of the epoch where needed."""
        need = self.batch_size * self.world
        parts = []
        epoch, offset = at.epoch, at.offset
        if self.drop_last and at.micro == 0 and self.order.size - offset < self.global_batch:
            epoch, offset = epoch + 1, 0
        while need and (self.epochs is None or epoch < self.epochs):
            stop = min(offset + need, self.order.size)
            parts.append(self.order.slice(epoch, offset, stop))
            need -= stop - offset
            epoch, offset = (epoch, stop) if stop < self.order.size else (epoch + 1, 0)
        empty = np.zeros(0, np.int64)
        positions = np.concatenate([part[0] for part in parts]) if parts else empty
        epochs = np.concatenate([part[1] for part in parts]) if parts else empty
        return positions, epochs, Cursor(epoch, offset)

    def _share(self, positions: np.ndarray, rank: int) -> np.ndarray:
        """Indices into `positions` of what `rank` gets."""
        count = len(positions)
        if self.mode == "cyclic":
            return np.arange(rank, count, self.world)
        if self.mode == "block":
            return np.array_split(np.arange(count), self.world)[rank]
        cost = np.asarray(self.costs, np.float64)[positions]
        room = [len(part) for part in np.array_split(np.arange(count), self.world)]
        load, shares = np.zeros(self.world), [[] for _ in range(self.world)]
        for index in np.argsort(-cost, kind="stable"):
            free = [r for r in range(self.world) if len(shares[r]) < room[r]]
            best = min(free, key=lambda r: load[r])
            load[best] += cost[index]
            shares[best].append(index)
        return np.sort(np.array(shares[rank], np.int64))
