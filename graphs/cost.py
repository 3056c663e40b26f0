"""What a step costs, counted without running it: FLOPs, bytes, activation memory, and a roofline time.

    cost = step_cost(model, batch_size=32, options=PlanOptions(dtype="bf16", device="h200"))
    print(cost.text())

The model runs forward and backward on the meta device, so shapes are real and nothing is computed. A dispatch mode sees
every op of both passes: FLOPs come from torch's formulas (matrix products, attention, convolutions), bytes are what an
op must read and write at least once, and memory is followed by the life of each storage. Ops are put down to the block
kind (class of the repeated block, or the top-level module) in which they ran.

The roofline of an op is max(FLOPs / peak, bytes / bandwidth); a step is their sum, or the host's launches if those take
longer. Figures are lower bounds: what is reached is 40 to 60 % of peak in matrix products and 80 to 90 % of bandwidth.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vlaforge.data.schema import Batch, Contract, Draw
from vlaforge.graphs.devices import GIB, DeviceKind
from vlaforge.graphs.options import PlanOptions
from vlaforge.graphs.plan import Plan, make_plan

aten = torch.ops.aten
OUTSIDE = "(outside)"
FORWARD, BACKWARD = "forward", "backward"


@dataclass
class Tally:
    """Totals of one kind of block in one direction. `pointwise` counts bytes of ops that do no matrix product."""

    ops: int = 0
    flops: int = 0
    bytes: int = 0
    pointwise: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> Tally:
        for name in ("ops", "flops", "bytes", "pointwise", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass
class Memory:
    """Bytes on one device."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    activations: int = 0
    batch: int = 0
    peak_transient: int = 0

    @property
    def total(self) -> int:
        return (
            self.weights + self.gradients + self.optimizer + self.masters + self.batch
            + max(self.activations, self.peak_transient)
        )  # fmt: skip

    def text(self) -> str:
        rows = (
            ("weights", self.weights), ("fp32 masters", self.masters), ("gradients", self.gradients),
            ("optimiser", self.optimizer), ("activations", max(self.activations, self.peak_transient)),
            ("batch", self.batch), ("total", self.total),
        )  # fmt: skip
        return "\n".join(f"{name:<14}{size / GIB:9.2f} GiB" for name, size in rows if size)


@dataclass
class Cost:
    """Counts of one micro-batch's forward and backward, by (kind, direction), and the memory of a step."""

    kinds: dict[tuple[str, str], Tally]
    memory: Memory
    device: DeviceKind
    dtype: torch.dtype
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> Tally:
        result = Tally()
        for tally in self.kinds.values():
            result.add(tally)
        return result

    def seconds(self, one_launch: bool = False) -> float:
        """Roofline time of the micro-batch; `one_launch` (a CUDA graph) leaves the host's launches out. 0.0 when the
        device's rates are unknown."""
        total = self.total
        host = 0.0 if one_launch or not self.device.cuda else total.ops * self.device.launch_s
        return max(total.seconds, host)

    def text(self) -> str:
        """A table by block kind."""
        lines = [f"{'':<28}{'ops':>8}{'GFLOP':>11}{'GB':>9}{'ms':>9}"]
        for (kind, direction), tally in sorted(self.kinds.items()):
            lines.append(
                f"{kind[:18]:<19}{direction:<9}{tally.ops:>8}{tally.flops / 1e9:>11.1f}"
                f"{tally.bytes / 1e9:>9.2f}{tally.seconds * 1e3:>9.2f}"
            )
        total = self.total
        lines.append(
            f"{'total':<28}{total.ops:>8}{total.flops / 1e9:>11.1f}{total.bytes / 1e9:>9.2f}{total.seconds * 1e3:>9.2f}"
        )
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- counting

VIEWS = {
    "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice",
    "select", "split", "split_with_sizes", "unbind", "detach", "alias", "as_strided", "chunk", "narrow", "unfold",
    "lift_fresh", "_reshape_alias", "diagonal", "empty", "empty_like", "empty_strided", "new_empty",
    "view_as_real", "view_as_complex", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "device",
    "is_same_size", "new_empty_strided",
}  # fmt: skip
"""Ops that move no data."""


def op_flops(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """FLOPs of one op by torch's formulas; 0 for ops that do no matrix product."""
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def op_bytes(args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an op must move: each distinct tensor in and out once."""
    seen: dict[int, int] = {}
    for value in tree_leaves((args, kwargs, out)):
        if isinstance(value, Tensor):
            seen[id(value)] = value.numel() * value.element_size()
    return sum(seen.values())


class _Counter(TorchDispatchMode):
    """Adds up ops by (kind, direction), and follows the bytes that are alive."""

    def __init__(self, device: DeviceKind, where: Callable[[], str]):
        super().__init__()
        self.device, self.where = device, where
        self.direction = FORWARD
        self.kinds: dict[tuple[str, str], Tally] = {}
        self.alive = self.peak = 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(getattr(func, "overloadpacket", func)).split(".")[-1]
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._follow(value)
        if name not in VIEWS:
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        flops, moved = op_flops(func, args, kwargs, out), op_bytes(args, kwargs, out)
        dtypes = [v.dtype for v in tree_leaves((args, out)) if isinstance(v, Tensor) and v.is_floating_point()]
        peak = self.device.flops(dtypes[0] if dtypes else torch.float32)
        bandwidth = self.device.bandwidth
        seconds = max(flops / peak if peak else 0.0, moved / bandwidth if bandwidth else 0.0)
        tally = self.kinds.setdefault((self.where(), self.direction), Tally())
        tally.add(Tally(1, flops, moved, 0 if flops else moved, seconds))

    def _follow(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)

        def gone(_: Any, key: int = key, size: int = size) -> None:
            self._storages.pop(key, None)
            self.alive -= size

        self._storages[key] = weakref.ref(storage, gone)


class _Kinds:
    """Which block kind is running: hooks on the repeated blocks and on the top-level modules.

    In the backward the kind is that of the forward call whose output's gradient is being computed, which hooks on the
    outputs' autograd nodes tell.
    """

    def __init__(self, model: nn.Module):
        self.stack: list[str] = []
        self.backward = OUTSIDE
        self.calls: dict[str, int] = {}
        self._handles: list[Any] = []
        named = {name: group.path for group in model.blocks() for name in group.names}
        for name, module in model.named_children():
            if name not in named and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                named.setdefault(name, name)
        for path, kind in named.items():
            module = model.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(self._enter(kind)))
            self._handles.append(module.register_forward_hook(self._leave(kind), always_call=True))

    def now(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return self.stack[-1] if self.stack else self.backward
        return self.stack[-1] if self.stack else OUTSIDE

    def _enter(self, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            for value in tree_leaves(args):
                if isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None:
                    # When the gradient reaches this block's input, its backward is over.
                    outer = self.stack[-1] if self.stack else OUTSIDE
                    value.grad_fn.register_prehook(lambda _, outer=outer: self._set(outer))
            self.stack.append(kind)
            self.calls[kind] = self.calls.get(kind, 0) + 1

        return hook

    def _leave(self, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.stack.pop()
            for value in tree_leaves(out):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(lambda _: self._set(kind))

        return hook

    def _set(self, kind: str) -> None:
        self.backward = kind

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def _meta_default() -> Iterator[None]:
    """Factory calls without a device make meta tensors inside."""
    with torch.device("meta"):
        yield


def meta_inputs(contract: Contract, batch_size: int, sizes: dict[str, int] | None = None) -> tuple[Batch, Draw]:
    """Batch and draw of the contract's shapes on the meta device.

    `sizes` maps the mask of a trim to the length that its axis is cut to (see `Contract.trims`).
    """
    shapes = {name: [batch_size, *spec.shape] for name, spec in contract.fields.items()}
    for trim in contract.trims:
        if sizes and trim.mask in sizes:
            for name, axis in trim.cut:
                shapes[name][axis] = min(shapes[name][axis], sizes[trim.mask])
    batch = Batch(
        {name: torch.empty(shapes[name], dtype=spec.dtype, device="meta") for name, spec in contract.fields.items()}
    )
    draw = Draw()
    for name, spec in contract.draws.items():
        dtype = torch.int64 if spec.kind == "seed" else torch.float32
        draw[name] = torch.empty((batch_size, *spec.shape), dtype=dtype, device="meta")
    return batch, draw


def count_step(model: nn.Module, batch: Batch, draw: Draw, options: PlanOptions, masters: bool | None = None) -> Cost:
    """Counts forward and backward of `model` (on the meta device) on one micro-batch, as the model is now."""
    kinds = _Kinds(model)
    counter = _Counter(options.device_kind, kinds.now)
    try:
        with _meta_default(), counter:
            loss = model(batch, draw).total()
            kept = counter.alive
            counter.direction = BACKWARD
            if loss.requires_grad:
                loss.backward()
    finally:
        kinds.remove()
    memory = _memory(model, options, masters)
    memory.activations = kept
    memory.peak_transient = max(0, counter.peak - memory.gradients)
    memory.batch = sum(v.numel() * v.element_size() for fields in (batch, draw) for v in fields.values())
    model.zero_grad(set_to_none=True)
    return Cost(counter.kinds, memory, options.device_kind, options.torch_dtype, dict(kinds.calls))


def _memory(model: nn.Module, options: PlanOptions, masters: bool | None) -> Memory:
    """Weights, gradients and AdamW's two moments on one device; FSDP divides them by the world."""
    memory = Memory()
    keeps = options.fp32_masters if masters is None else masters
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        memory.weights += size
        if not parameter.requires_grad:
            continue
        memory.gradients += size
        low = parameter.dtype != torch.float32
        memory.optimizer += 2 * parameter.numel() * (4 if keeps or not low else parameter.element_size())
        memory.masters += parameter.numel() * 4 if low and keeps else 0
    if options.strategy in ("fsdp", "hsdp"):
        for name in ("weights", "gradients", "optimizer", "masters"):
            setattr(memory, name, getattr(memory, name) // options.world)
    return memory


# ---------------------------------------------------------------------------------------------------- plans


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device, whatever device it is on; the copy shares nothing."""
    if all(parameter.is_meta for parameter in model.parameters()):
        return copy.deepcopy(model)
    with torch.device("meta"):
        return type(model)(model.config)


def step_cost(
    model: nn.Module, contract: Contract, options: PlanOptions, sizes: dict[str, int] | None = None
) -> tuple[Cost, Plan]:
    """Cost of one micro-batch under the plan for `options`; `model` is not changed (a meta copy is lowered).

    `compile_blocks` and captures run on no meta tensor: their effect is not in the counts, see `pass_shares`.
    `sizes` gives the lengths that trimmed axes have where `trim_tokens` is on.
    """
    twin = on_meta(model)
    plan = make_plan(twin, contract, options)
    skipped = {"compile_blocks", "graph_blocks"}
    for entry in plan.entries:
        if entry.state == "on" and entry.rule.stage == "module" and entry.name not in skipped:
            entry.rule.apply(twin, entry.sites, plan.context)
    batch, draw = meta_inputs(contract, options.batch_size, sizes if plan.on("trim_tokens") else None)
    return count_step(twin, batch, draw, options), plan
