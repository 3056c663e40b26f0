"""A micro-batch on its way from a worker to the main process: written to shared memory that both have from the start.

torch sends each tensor as a file descriptor of its own, which the receiver fetches over a socket from a thread of the
worker, while that worker wants the interpreter for its next batch. On a busy machine these turns of processes, not the
decoding, decide how fast several workers feed. Here a worker writes to the next slot of a ring and sends the place.

A slot is free again when the worker is asked for the batch that will take it: torch's DataLoader asks for a worker's
batch k + `prefetch` only after it was given batch k, and batch k - 1 was copied out before that.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from itertools import count
from math import prod
from multiprocessing.reduction import DupFd
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from vlaforge.data.schema import Batch, Draw, Minibatch

_ALIGN = 64  # bytes: enough for any dtype and any vector load
_SLOT = 256 << 20  # bytes of address space; memory is taken where something is written

Entry = tuple[str, torch.dtype, tuple[int, ...], int]
"""(name, dtype, shape, first byte)."""


class Ring:
    """`prefetch` + 2 slots of shared memory for each of `workers`; made in the main process before they start.

    A file without a name, so that it goes with its last process. torch's own shared memory would be taken whole at
    once, and counts against /dev/shm, which is small in containers.
    """

    def __init__(self, workers: int, prefetch: int, slot: int = _SLOT):
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("vlaforge-batches"), "r+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the ring is)
        self.key, self._shape = next(_KEYS), (workers, prefetch + 2, slot)
        self._file.truncate(prod(self._shape))
        self._map()
        _RINGS[self.key] = self

    def _map(self) -> None:
        self._turn = 0
        self.memory = torch.frombuffer(mmap.mmap(self._file.fileno(), 0), dtype=torch.uint8).view(self._shape)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is being started; `fork` needs none of it."""
        return {"key": self.key, "_shape": self._shape, "file": DupFd(self._file.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.key, self._shape = state["key"], state["_shape"]
        self._file = os.fdopen(state["file"].detach(), "r+b")
        self._map()

    def next(self, worker: int) -> tuple[tuple[int, int, int], Tensor]:
        """(place, uint8 [slot]) that this worker writes to now."""
        slot, self._turn = self._turn, (self._turn + 1) % self.memory.shape[1]
        return (self.key, worker, slot), self.memory[worker, slot]


_KEYS = count()
_RINGS: WeakValueDictionary[int, Ring] = WeakValueDictionary()
"""Of this process, so that a parcel finds its ring, also in the thread that pins."""


@dataclass(frozen=True)
class Parcel:
    """The batch's fields, the draw's and the sample ids, at the entries' places in `size` bytes.

    They lie in a slot of a ring, (ring, worker, slot), or where they are too large for one in `memory`, uint8 [size].
    """

    size: int
    batch: tuple[Entry, ...]
    draw: tuple[Entry, ...]
    ids: Entry
    epoch: int
    stream: str
    place: tuple[int, int, int] | None = None
    memory: Tensor | None = None

    def open(self) -> Minibatch:
        """The micro-batch, in memory of its own."""
        return self._views(self._bytes().clone() if self.memory is None else self.memory)

    def pin_memory(self) -> Minibatch:
        """The micro-batch, in page-locked memory; torch's pinning thread calls it."""
        return self._views(self._bytes().pin_memory())

    def _bytes(self) -> Tensor:
        if self.memory is not None:
            return self.memory
        ring, worker, slot = self.place
        return _RINGS[ring].memory[worker, slot, : self.size]

    def _views(self, memory: Tensor) -> Minibatch:
        def part(entries: tuple[Entry, ...]) -> dict[str, Tensor]:
            return {entry[0]: _view(memory, entry) for entry in entries}

        return Minibatch(
            Batch(part(self.batch)), Draw(part(self.draw)), _view(memory, self.ids), self.epoch, stream=self.stream
        )


def _view(memory: Tensor, entry: Entry) -> Tensor:
    _, dtype, shape, start = entry
    return memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def pack(made: Minibatch, ring: Ring) -> Parcel:
    """`made`, whose tensors are on the CPU, as a parcel; called in a worker."""
    size = 0

    def place(name: str, value: Tensor) -> Entry:
        nonlocal size
        start, size = size, size + -(-value.nbytes // _ALIGN) * _ALIGN
        return name, value.dtype, tuple(value.shape), start

    batch, draw = (tuple(place(*item) for item in part.items()) for part in (made.batch, made.draw))
    ids = place("ids", made.ids)
    info = get_worker_info()
    if size <= ring.memory.shape[2]:
        where, memory = ring.next(info.id if info else 0)
        sent = None
    else:
        where, memory = None, torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
        sent = memory
    for entries, values in ((batch, made.batch), (draw, made.draw), ((ids,), {"ids": made.ids})):
        for entry in entries:
            _view(memory, entry).copy_(values[entry[0]])
    return Parcel(size, batch, draw, ids, made.epoch, made.stream, where, sent)
