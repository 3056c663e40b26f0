"""Many tensors in one launch: a table on the device says where each lies, and which tensor a chunk belongs to.

A row of the table is a tensor's addresses (one for each list it is part of), its length and its first chunk. A program
takes one chunk of `BLOCK` · `BLOCKS` elements. What depends on lengths alone is kept by lengths; the table is kept as
long as the addresses do not change, and sent again (from pinned memory, without waiting) when they do.

While a CUDA graph is captured nothing may be allocated, on the host or outside of the graph's pool. Tables of a capture
therefore lie in a `Store` that was reserved before, by the steps that ran without a graph (a capture needs such a
warm-up anyway). What a graph reads is never given back or written again: a replay sends the same numbers once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import cdiv
from vlaforge.kernels.spec import KernelError

BLOCK, BLOCKS = 1024, 8
CHUNK = BLOCK * BLOCKS
_MOST = 64

Columns = tuple[tuple[int, ...], ...]
"""What a table holds: for each list the addresses, then the lengths, then the first chunks."""

_TL = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def dtype_of(tensors: Sequence[Tensor]) -> Any:
    """Triton's name of the tensors' dtype; None for no tensors."""
    return getattr(tl, _TL[tensors[0].dtype]) if tensors else None


@dataclass(frozen=True)
class Addresses:
    """`table` int64 [n, lists + 2], `owner` int32 [chunks]: the tensor of each chunk."""

    table: Tensor
    owner: Tensor
    chunks: int
    aligned: bool

    @classmethod
    def of(cls, lists: Sequence[Sequence[Tensor]]) -> Addresses:
        """The table of tensors that stand side by side in `lists` (empty lists give zeros)."""
        device = lists[0][0].device
        lengths = tuple(tensor.numel() for tensor in lists[0])
        owner, first = _owner(lengths, device)
        if device.type == "meta":
            table = torch.empty(len(lengths), len(lists) + 2, dtype=torch.int64, device=device)
            return cls(table, owner, owner.shape[0], True)
        columns = [tuple(t.data_ptr() for t in part) if part else (0,) * len(lengths) for part in lists]
        aligned = not any(number % 16 for column in columns for number in column)
        return cls(_table((*columns, lengths, first), device), owner, owner.shape[0], aligned)


class Store:
    """Room for the tables of captured graphs: pinned memory and as much on the device, given out in order, for good.

    Args:
        size: int64 numbers.
    """

    LEAST = 1 << 19

    def __init__(self, size: int, device: torch.device):
        self.host = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.table = torch.empty(size, dtype=torch.int64, device=device)
        self.used = 0

    @property
    def room(self) -> int:
        return self.table.shape[0] - self.used

    def put(self, columns: Columns) -> Tensor:
        """The table [n, columns], in a place of its own; KernelError when there is no room for it."""
        shape = len(columns[0]), len(columns)
        count, start = shape[0] * shape[1], self.used
        if count > self.room:
            raise KernelError("take one optimiser step before capturing it: its table of addresses is not there yet")
        self.used = min(start + cdiv(count, 16) * 16, self.table.shape[0])  # rows start at 128 bytes
        host, table = (part[start : start + count].view(shape) for part in (self.host, self.table))
        return _send(columns, host, table)


_owners: OrderedDict[tuple, tuple[Tensor, tuple[int, ...]]] = OrderedDict()
_tables: OrderedDict[tuple, Tensor] = OrderedDict()
_stores: dict[torch.device, list[Store]] = {}
_captured: list[Tensor] = []
"""Owners that a graph reads, so that they outlive `_owners`."""


def capturing(device: torch.device) -> bool:
    """Whether launches on `device` are being recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def reserve(device: torch.device) -> Store:
    """The device's store, with room for all tables that are in use: more than one step has."""
    stores = _stores.setdefault(device, [])
    need = sum(table.numel() + 16 for (_, place), table in _tables.items() if place == device)
    if not stores or stores[-1].room < need:
        stores.append(Store(max(Store.LEAST, 4 * need), device))
    return stores[-1]


def _kept(store: OrderedDict, key: tuple, make):
    """`store[key]`, made when absent; the least recently used entry goes when there are too many."""
    if key not in store:
        store[key] = make()
        if len(store) > _MOST:
            store.popitem(last=False)
    store.move_to_end(key)
    return store[key]


def _owner(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """(tensor of each chunk, first chunk of each tensor)."""

    def make() -> tuple[Tensor, tuple[int, ...]]:
        if capturing(device):
            raise KernelError("take one optimiser step before capturing it: these tensors were not seen yet")
        counts = torch.tensor([cdiv(length, CHUNK) for length in lengths])
        owner = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), counts)
        first = torch.cumsum(counts, 0) - counts
        return owner.to(device), tuple(first.tolist())

    found = _kept(_owners, (lengths, device), make)
    if capturing(device):
        _captured.append(found[0])
    return found


def _table(columns: Columns, device: torch.device) -> Tensor:
    """The table [n, columns] on the device."""
    if capturing(device):
        if device not in _stores:
            raise KernelError("take one optimiser step before capturing it: its table of addresses is not there yet")
        return _stores[device][-1].put(columns)

    def make() -> Tensor:
        host = torch.empty(len(columns[0]), len(columns), dtype=torch.int64, pin_memory=device.type == "cuda")
        return _send(columns, host, torch.empty_like(host, device=device))

    table = _kept(_tables, (columns, device), make)
    if device.type == "cuda":
        reserve(device)
    return table


def _send(columns: Columns, host: Tensor, table: Tensor) -> Tensor:
    host.copy_(torch.tensor(columns, dtype=torch.int64).T)
    return table.copy_(host, non_blocking=True)


@triton.jit
def locate(table_ptr, owner_ptr, LISTS: tl.constexpr, CHUNK_SIZE: tl.constexpr):
    """(row of this program's tensor, its first element here, the tensor's length)."""
    chunk = tl.program_id(0)
    row = table_ptr + tl.load(owner_ptr + chunk).to(tl.int64) * (LISTS + 2)
    numel = tl.load(row + LISTS)
    start = (chunk - tl.load(row + LISTS + 1)) * CHUNK_SIZE
    return row, start, numel


@triton.jit
def pointer(place, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address that stands at `place`, as a pointer; `ALIGNED` to 16 bytes, so that loads can be wide."""
    address = tl.load(place).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def read(ptr, at, numel, FULL: tl.constexpr):
    """Elements as fp32; without a mask in a FULL chunk, where it would forbid wide loads."""
    if FULL:
        x = tl.load(ptr + at)
    else:
        x = tl.load(ptr + at, mask=at < numel, other=0.0)
    return x.to(tl.float32)


@triton.jit
def write(ptr, at, x, numel, FULL: tl.constexpr):
    if FULL:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=at < numel)
