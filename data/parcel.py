"""A micro-batch as one block of shared memory, to cross from a worker to the main process at once.

torch sends each tensor as a file descriptor of its own, which the receiver fetches over a socket from a thread of the
worker, while that worker wants the interpreter for its next batch. For a dozen small tensors a batch these turns, not
the decoding, decide how fast several workers feed on a busy machine. One block is one turn, and one copy to pin.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Draw, Minibatch

_ALIGN = 64  # bytes: enough for any dtype and any vector load

Entry = tuple[str, torch.dtype, tuple[int, ...], int]
"""(name, dtype, shape, first byte)."""


@dataclass(frozen=True)
class Parcel:
    """`memory` uint8 [bytes] holds the batch's fields, the draw's and the sample ids, at the entries' places."""

    memory: Tensor
    batch: tuple[Entry, ...]
    draw: tuple[Entry, ...]
    ids: Entry
    epoch: int
    stream: str

    def pin_memory(self) -> Parcel:
        return replace(self, memory=self.memory.pin_memory())

    def open(self) -> Minibatch:
        """The micro-batch; its tensors are views of the block, which lives as long as one of them."""
        batch, draw = ({entry[0]: self._view(entry) for entry in entries} for entries in (self.batch, self.draw))
        return Minibatch(Batch(batch), Draw(draw), self._view(self.ids), self.epoch, stream=self.stream)

    def _view(self, entry: Entry) -> Tensor:
        _, dtype, shape, start = entry
        size = dtype.itemsize
        for length in shape:
            size *= length
        return self.memory[start : start + size].view(dtype).view(shape)


def pack(made: Minibatch) -> Parcel:
    """`made`, whose tensors are on the CPU, in one block of shared memory."""
    at = 0

    def place(name: str, value: Tensor) -> Entry:
        nonlocal at
        start, at = at, at + -(-value.nbytes // _ALIGN) * _ALIGN
        return name, value.dtype, tuple(value.shape), start

    batch, draw = (tuple(place(*item) for item in part.items()) for part in (made.batch, made.draw))
    ids = place("ids", made.ids)
    # as torch's own collate does in a worker: written where the receiver reads it, not copied there afterwards
    memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(at))
    parcel = Parcel(memory, batch, draw, ids, made.epoch, made.stream)
    for entries, values in ((batch, made.batch), (draw, made.draw), ((ids,), {"ids": made.ids})):
        for entry in entries:
            parcel._view(entry).copy_(values[entry[0]])
    return parcel
