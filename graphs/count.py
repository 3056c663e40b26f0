"""Counting ops as they are dispatched: FLOPs, bytes, live memory, and the block kind each belongs to."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vlaforge.graphs.devices import DeviceKind

aten = torch.ops.aten
OUTSIDE = "(outside)"
FORWARD, BACKWARD = "forward", "backward"

VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice",
    "select", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided", "chunk", "narrow", "unfold",
    "lift_fresh", "_reshape_alias", "diagonal", "view_as_real", "view_as_complex", "sym_size", "sym_numel",
    "sym_stride", "sym_storage_offset", "device", "is_same_size",
}  # fmt: skip
"""Ops that move no data and make no storage."""

ROOM = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Ops that make a storage and move no data."""


def op_flops(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """FLOPs of one op: torch's formulas (2·M·N·K for a product), and ours where it has none; 0 without a product."""
    packet = getattr(func, "overloadpacket", func)
    ours = FLOPS.get(str(packet))
    if ours is not None:
        return ours(args)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _attention_flops(args: tuple, products: int, first: int = 0) -> int:
    """`products` of the size q·kᵀ (2·B·H·T·S·K each)."""
    q, k = args[first], args[first + 1]
    return products * 2 * q.numel() * k.shape[-2]


def _convolution_backward_flops(args: tuple) -> int:
    """A product of the forward's size for each gradient that is wanted; torch's own formula ignores groups."""
    grad, _, weight = args[:3]
    return 2 * grad.numel() * weight[0].numel() * sum(map(bool, args[-1][:2]))


FLOPS: dict[str, Callable[[tuple], int]] = {
    "vlaforge_cpu.gemm_nt": lambda args: 2 * args[0].numel() * args[1].shape[-2],
    "vlaforge_cpu.tile_product": lambda args: 2 * args[0].numel() * args[1].shape[-1],
    "vlaforge_cpu.weight_gradient": lambda args: 2 * args[0].numel() * args[1].shape[-1],
    "vlaforge_cpu.attention": lambda args: _attention_flops(args, 2),
    "vlaforge_cpu.attention_backward": lambda args: _attention_flops(args, 4, first=1),
    "vlaforge_cpu.tiled_attention": lambda args: _attention_flops(args, 2),
    "vlaforge_cpu.tiled_attention_backward": lambda args: _attention_flops(args, 5, first=1),
    "vlaforge_cpu.depthwise": lambda args: 2 * args[0].numel() * 9,
    "vlaforge_cpu.depthwise_backward": lambda args: 4 * args[0].numel() * 9,
    "aten.convolution_backward": _convolution_backward_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda args: _attention_flops(args, 2),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda args: _attention_flops(args, 5, first=1),
}


@contextmanager
def blocked_attention() -> Iterator[None]:
    """On the meta device SDPA falls back to products with the scores in memory; devices run a blocked kernel that keeps
    none. Inside, attention is counted as the latter (the mask, a few bytes, is left out).

    The function itself is replaced: a torch-function mode would be off in recompute, which runs inside `backward`.
    """

    def counted(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float | None = None, **kwargs: Any) -> Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1, output_size=q.shape[1]) for x in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)[0]

    usual, F.scaled_dot_product_attention = F.scaled_dot_product_attention, counted
    try:
        yield
    finally:
        F.scaled_dot_product_attention = usual


def op_bytes(args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an op must move: each distinct tensor in and out once."""
    seen = {id(value): size_of(value) for value in tree_leaves((args, kwargs, out)) if isinstance(value, Tensor)}
    return sum(seen.values())


def size_of(value: Tensor) -> int:
    return value.numel() * value.element_size()


@dataclass
class Tally:
    """Totals of one kind of block in one direction.

    Args:
        ops: that move data; each is a kernel of its own in eager execution.
        flops: of products.
        bytes: moved by all ops.
        pointwise: bytes moved by ops that are no product.
        products_s: roofline seconds of the products.
        chains: kernels that the pointwise ops become when neighbours are fused.
        chained: bytes that those kernels move.
    """

    ops: int = 0
    flops: int = 0
    bytes: int = 0
    pointwise: int = 0
    products_s: float = 0.0
    chains: int = 0
    chained: int = 0
    pointwise_ops: int = 0

    def add(self, other: Tally) -> Tally:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def fused(self) -> Tally:
        """The same with each chain of pointwise ops as one kernel."""
        return replace(
            self,
            ops=self.ops - self.pointwise_ops + self.chains,
            bytes=self.bytes - self.pointwise + self.chained,
            pointwise=self.chained,
            pointwise_ops=self.chains,
        )


@dataclass
class _Value:
    """A storage that an op made: by whom, and whether its write was put down to a chain already."""

    size: int
    pointwise: bool
    direction: str
    charge: Tally
    charged: bool = False


class Counter(TorchDispatchMode):
    """Adds up ops by (kind, direction), and follows the bytes that are alive.

    A chain is a run of pointwise ops of one kind. It reads what others made, and writes what others read or what is
    still alive when the direction turns; what stays inside costs nothing.
    """

    def __init__(self, device: DeviceKind, where: Callable[[], str]):
        super().__init__()
        self.device, self.where = device, where
        self.direction = FORWARD
        self.kinds: dict[tuple[str, str], Tally] = {}
        self.alive = self.peak = 0
        self._storages: dict[int, Any] = {}
        self._made: dict[int, _Value] = {}
        self._chain: tuple[str, str] | None = None

    def turn(self, direction: str) -> None:
        """From forward to backward: whatever is alive was written."""
        for value in self._made.values():
            self._write(value)
        self.direction, self._chain = direction, None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "overloadpacket", func)).split(".")[-1]
        if name == "_local_scalar_dense":
            # Someone asks what a value is, and there is none: true, or one, lets the shapes come out.
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **kwargs)
        if name in ROOM:
            self._follow(out, None)
        elif name not in VIEWS:
            self._follow(out, self._count(func, args, kwargs, out))
        return out

    def _count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> Tally:
        flops, moved = op_flops(func, args, kwargs, out), op_bytes(args, kwargs, out)
        key = (self.where(), self.direction)
        tally = self.kinds.setdefault(key, Tally())
        read = sum(
            self._read(value, key, not flops) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)
        )
        if flops:
            tally.add(Tally(ops=1, flops=flops, bytes=moved, products_s=self._roofline(args, out, flops, moved)))
            self._chain = None
        else:
            tally.add(
                Tally(ops=1, bytes=moved, pointwise=moved, chained=read, chains=self._chain != key, pointwise_ops=1)
            )
            self._chain = key
        return tally

    def _roofline(self, args: Any, out: Any, flops: int, moved: int) -> float:
        dtypes = [v.dtype for v in tree_leaves((args, out)) if isinstance(v, Tensor) and v.is_floating_point()]
        peak, bandwidth = self.device.flops(dtypes[0] if dtypes else torch.float32), self.device.bandwidth
        return max(flops / peak if peak else 0.0, moved / bandwidth if bandwidth else 0.0)

    def _read(self, value: Tensor, key: tuple[str, str], pointwise: bool) -> int:
        """Bytes that a chain reads of an input; a reader outside of the maker's chain makes the maker write it."""
        made = self._made.get(value.untyped_storage()._cdata)
        inside = made is not None and made.pointwise and pointwise and self._chain == key
        if inside and made.direction == self.direction:
            return 0
        if made is not None:
            self._write(made)
        return size_of(value)

    @staticmethod
    def _write(value: _Value) -> None:
        if value.pointwise and not value.charged:
            value.charged = True
            value.charge.chained += value.size

    def _follow(self, out: Any, tally: Tally | None) -> None:
        for value in tree_leaves(out):
            if not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._storages:
                continue
            size = storage.nbytes()
            self.alive += size
            self.peak = max(self.peak, self.alive)
            self._storages[key] = weakref.ref(storage, self._gone(key, size))
            if tally is not None:
                self._made[key] = _Value(size, self._chain is not None, self.direction, tally)

    def _gone(self, key: int, size: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._storages.pop(key, None)
            self._made.pop(key, None)
            self.alive -= size

        return gone


class Kinds:
    """Which block kind is running: hooks on the repeated blocks and on the top-level modules.

    In the forward it is the innermost module that is being called. In the backward it is the kind in which the autograd
    node was made, which its sequence number tells.
    """

    def __init__(self, model: nn.Module):
        self.calls: dict[str, int] = {}
        self._stack: list[str] = []
        self._starts: list[int] = [0]
        self._kinds: list[str] = [OUTSIDE]
        self._handles: list[Any] = []
        named = {name: group.path for group in model.blocks() for name in group.names}
        for name, module in model.named_children():
            if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                named.setdefault(name, name)
        for path, kind in named.items():
            module = model.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(self._enter(kind)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def now(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            return self._stack[-1] if self._stack else OUTSIDE
        number = node._sequence_nr()
        if number >= 2**62:  # the nodes that add to `.grad` have no place in the forward
            return OUTSIDE
        return self._kinds[bisect_right(self._starts, number) - 1]

    def _mark(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._kinds.append(self._stack[-1] if self._stack else OUTSIDE)

    def _enter(self, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append(kind)
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self._mark()

        return hook

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._stack.pop()
        self._mark()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
