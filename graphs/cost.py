"""What a step costs, counted without running it: FLOPs, bytes, activation memory, and a roofline time.

    cost, plan = step_cost(model, contract, PlanOptions(dtype="bf16", device="h200", batch_size=32))
    print(cost.text(), cost.memory.text())

The model runs forward and backward on the meta device, so shapes are real and nothing is computed. A dispatch mode sees
every op of both passes: FLOPs come from torch's formulas (matrix products, attention, convolutions), bytes are what an
op must read and write at least once, and memory is followed by the life of each storage (`graphs.count`). Ops are put
down to the block kind, or else the top-level module, in which they ran.

The roofline of a product is max(FLOPs / peak, bytes / bandwidth), of anything else its bytes / bandwidth; a step takes
their sum, or the host's launches where those take longer. It is a lower bound: 40 to 60 % of peak is reached in
products, 80 to 90 % of the bandwidth. What `compile_blocks` and a CUDA graph do is estimated from the same counts: a
chain of elementwise ops becomes one kernel that reads what comes into the chain and writes what leaves it, and a
captured step has one launch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from vlaforge.data.schema import Batch, Contract, Draw
from vlaforge.graphs.count import BACKWARD, Counter, Kinds, Tally, blocked_attention
from vlaforge.graphs.devices import GIB, DeviceKind
from vlaforge.graphs.options import PlanOptions
from vlaforge.graphs.plan import Plan, make_plan
from vlaforge.graphs.rows import cut_tables

NOT_ON_META = ("compile_blocks", "graph_blocks")
"""Module passes whose effect is estimated from the counts instead of being applied."""


@dataclass
class Memory:
    """Bytes on one device. `activations` are alive at the end of the forward; `peak` is the most at any time in
    forward and backward, without weights and gradients; `frozen` are networks beside the model that a step runs."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    masters: int = 0
    frozen: int = 0
    activations: int = 0
    peak: int = 0
    batch: int = 0

    @property
    def total(self) -> int:
        held = self.weights + self.gradients + self.optimizer + self.masters + self.frozen + self.batch
        return held + max(self.activations, self.peak)

    def text(self) -> str:
        rows = {
            "weights": self.weights,
            "fp32 masters": self.masters,
            "gradients": self.gradients,
            "optimiser": self.optimizer,
            "encoders": self.frozen,
            "activations": max(self.activations, self.peak),
            "batch": self.batch,
            "total": self.total,
        }
        return "\n".join(f"{name:<14}{size / GIB:9.2f} GiB" for name, size in rows.items() if size)


@dataclass
class Cost:
    """Counts of one micro-batch's forward and backward, by (kind, direction), and the memory of a step.

    `compiled` names the kinds whose elementwise chains are fused, `captured` says that a step is one launch.
    """

    kinds: dict[tuple[str, str], Tally]
    memory: Memory
    device: DeviceKind
    compiled: frozenset[str] = frozenset()
    captured: bool = False
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> Tally:
        result = Tally()
        for (kind, _), tally in self.kinds.items():
            result.add(tally.fused() if kind in self.compiled else tally)
        return result

    def device_seconds(self, tally: Tally | None = None) -> float:
        """Roofline time on the device; 0 when its rates are unknown."""
        tally = tally or self.total
        return tally.products_s + (tally.pointwise / self.device.bandwidth if self.device.bandwidth else 0.0)

    def seconds(self) -> float:
        """Roofline time of the micro-batch: the device's, or the host's launches where those take longer."""
        launches = 0.0 if self.captured or not self.device.cuda else self.total.ops * self.device.launch_s
        return max(self.device_seconds(), launches)

    def text(self) -> str:
        """A table by block kind; ms are the device's roofline."""
        lines = [f"{'':<28}{'ops':>8}{'GFLOP':>11}{'GB':>9}{'ms':>9}"]
        rows = {" ".join(f"{part:<18}" for part in key): tally for key, tally in sorted(self.kinds.items())}
        for name, tally in {**rows, "total": self.total}.items():
            fused = tally.fused() if name.split()[0] in self.compiled else tally
            lines.append(
                f"{name[:28]:<28}{fused.ops:>8}{fused.flops / 1e9:>11.1f}{fused.bytes / 1e9:>9.2f}"
                f"{self.device_seconds(fused) * 1e3:>9.2f}"
            )
        return "\n".join(lines)


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


def count_step(model: nn.Module, batch: Batch, draw: Draw, options: PlanOptions) -> Cost:
    """Counts forward and backward of `model` (on the meta device) on one micro-batch, as the model is now."""
    kinds = Kinds(model)
    counter = Counter(options.device_kind, kinds.now)
    memory = weights_memory(model, options)
    # Built before anything is counted: encoders are made once a run, not in a step.
    memory.frozen = sum(_held(network) for network in model.frozen_networks("meta").values())
    try:
        with torch.device("meta"), blocked_attention(), counter:
            loss = model(batch, draw).total()
            memory.activations = counter.alive
            counter.turn(BACKWARD)
            if loss.requires_grad:
                loss.backward()
    finally:
        kinds.remove()
    memory.peak = max(0, counter.peak - memory.gradients)
    memory.batch = sum(v.numel() * v.element_size() for fields in (batch, draw) for v in fields.values())
    model.zero_grad(set_to_none=True)
    return Cost(counter.kinds, memory, options.device_kind, calls=dict(kinds.calls))


def _held(network: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in (*network.parameters(), *network.buffers()))


def weights_memory(model: nn.Module, options: PlanOptions) -> Memory:
    """Weights, gradients, masters and AdamW's two moments on one device; FSDP divides them by the world. The rows of
    tables that do not train stay on the host, which a CPU is itself."""
    memory = Memory()
    for parameter in model.parameters():
        size = parameter.numel() * parameter.element_size()
        memory.weights += size
        if not parameter.requires_grad:
            continue
        memory.gradients += size
        low = parameter.dtype != torch.float32
        wide = options.fp32_masters or not low
        memory.optimizer += 2 * parameter.numel() * (4 if wide else parameter.element_size())
        memory.masters += parameter.numel() * 4 if low and options.fp32_masters else 0
    if options.strategy in ("fsdp", "hsdp"):
        for name in ("weights", "gradients", "optimizer", "masters"):
            setattr(memory, name, getattr(memory, name) // options.world)
    if not options.device_kind.cuda:
        memory.weights += sum(rows.rest.nbytes for rows in cut_tables(model).values())
    return memory


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device, whatever device it is on; the copy shares nothing."""
    if all(parameter.is_meta for parameter in model.parameters()):
        return copy.deepcopy(model)
    with torch.device("meta"):
        twin = type(model)(model.config)
    for name, parameter in model.named_parameters():
        twin.get_parameter(name).requires_grad_(parameter.requires_grad)
    return twin


def lowered(model: nn.Module, contract: Contract, options: PlanOptions) -> tuple[nn.Module, Plan]:
    """A copy of `model` on the meta device, changed by the plan for `options` as far as that can be; and the plan."""
    twin = on_meta(model)
    plan = make_plan(twin, contract, options)
    with torch.device("meta"):
        for entry in plan.entries:
            if entry.state == "on" and entry.rule.stage == "module" and entry.name not in NOT_ON_META:
                entry.rule.apply(twin, entry.sites, plan.context)
    return twin, plan


def step_cost(
    model: nn.Module, contract: Contract, options: PlanOptions, sizes: dict[str, int] | None = None
) -> tuple[Cost, Plan]:
    """Cost of one micro-batch under the plan for `options`; `model` is not changed (a meta copy is lowered).

    `sizes` gives the lengths that trimmed axes have where `trim_tokens` is on, by the trim's mask; without it, and for
    memory, the full ones count.
    """
    twin, plan = lowered(model, contract, options)
    compiled = frozenset(group.path for group in twin.blocks()) if plan.on("compile_blocks") else frozenset()
    batch, draw = meta_inputs(contract, options.batch_size, sizes if plan.on("trim_tokens") else None)
    cost = count_step(twin, batch, draw, options)
    cost.compiled, cost.captured = compiled, plan.on("graph_step")
    return cost, plan


@dataclass(frozen=True)
class Share:
    """What one pass takes off a step: the counts with the whole plan, as a part of those without the pass."""

    name: str
    flops: float
    bytes: float
    launches: float
    seconds: float

    def text(self) -> str:
        parts = [self.flops, self.bytes, self.launches, self.seconds]
        return f"{self.name:<16}" + "".join(f"{part:>10.1%}" for part in parts)


def pass_shares(
    model: nn.Module, contract: Contract, options: PlanOptions, sizes: dict[str, int] | None = None
) -> list[Share]:
    """For each pass of the plan that is on: what the step would cost more without it (1 - with / without)."""
    whole, plan = step_cost(model, contract, options, sizes)
    shares = []
    for entry in plan.entries:
        if entry.state != "on":
            continue
        asked = tuple(name for name in options.with_ if name != entry.name)
        less = replace(options, without=(*options.without, entry.name), with_=asked)
        other, _ = step_cost(model, contract, less, sizes)
        pairs = (
            (whole.total.flops, other.total.flops),
            (whole.total.bytes, other.total.bytes),
            (1 if whole.captured else whole.total.ops, 1 if other.captured else other.total.ops),
            (whole.seconds(), other.seconds()),
        )
        shares.append(Share(entry.name, *(1 - now / then if then else 0.0 for now, then in pairs)))
    return shares
