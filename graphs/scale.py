"""Many devices on paper: memory a device, bytes on the wire and time of a step, for each strategy.

    work = workload(model, contract, options)           counted; or Workload(...) with numbers from elsewhere
    print(table(work, world=64, device=device_kind("h200")))

The traffic is that of rings: with n ranks, gathering or scattering B bytes moves (n-1)/n · B in and out of each, an
all-reduce twice that. Times are expectations, not measurements: products reach `REACHED` of the roofline, a transfer
reaches `LINK_REACHED` of its link, and DDP hides its transfer behind the backward, the sharded strategies theirs behind
forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from vlaforge.data.schema import Contract
from vlaforge.graphs.cost import step_cost
from vlaforge.graphs.devices import GIB, DeviceKind
from vlaforge.graphs.options import PlanOptions

REACHED = 0.5
LINK_REACHED = 0.8
BACKWARD = 2 / 3
"""Share of a step's compute that is the backward."""
ADAM_BYTES = 4 + 2 * 8 + 4 + 2
"""Bytes an fp32 parameter's update moves: gradient, both moments in and out, master in and out with its bf16 copy."""


@dataclass(frozen=True)
class Workload:
    """What one device does in a step, before it is shared.

    Args:
        trained, frozen: parameters. unit: those of the largest sharding unit.
        seconds: roofline time of forward and backward. activations: bytes alive at the peak.
        weight_bytes: a parameter in the compute precision. reduce_bytes: a gradient on the wire of sharded strategies.
    """

    name: str
    trained: float
    frozen: float
    unit: float
    seconds: float
    activations: float
    weight_bytes: int = 2
    reduce_bytes: int = 4


@dataclass(frozen=True)
class Network:
    """`across`: bytes/s a device between machines (400 Gbit/s by default); `inside` is the device kind's own link."""

    per_node: int = 8
    across: float = 50e9


@dataclass(frozen=True)
class Row:
    """One strategy. Bytes are of one rank; `inside` and `across` are sent in a step within and between machines."""

    strategy: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    inside: float
    across: float
    seconds: float
    exposed: float
    fits: bool

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def workload(model: nn.Module, contract: Contract, options: PlanOptions) -> Workload:
    """Counts `model` (it may be on the meta device) under the plan for one device of `options`."""
    cost, _ = step_cost(model, contract, replace(options, world=1, strategy="none"))
    sizes = [sum(p.numel() for p in block.parameters()) for group in model.blocks() for block in group.modules(model)]
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    low = options.dtype != "float32"
    held = max(cost.memory.activations, cost.memory.peak)
    seconds = cost.seconds() * options.accumulate
    return Workload(getattr(model, "family", ""), trained, frozen, max(sizes), seconds, held, 2 if low else 4)


def strategies(world: int, per_node: int) -> list[tuple[str, int]]:
    """(strategy, ranks that share a copy): HSDP shards within a machine, when there are several."""
    rows = [("ddp", 1), ("ddp --zero-optimizer", world), ("fsdp", world)]
    if world > per_node and world % per_node == 0:
        rows.append((f"fsdp --hsdp-shard-size {per_node}", per_node))
    return rows


def estimate(work: Workload, world: int, device: DeviceKind, network: Network | None = None) -> list[Row]:
    """Every strategy on `world` devices."""
    network = network or Network()
    return [_row(work, name, shard, world, device, network) for name, shard in strategies(world, network.per_node)]


def _row(work: Workload, name: str, shard: int, world: int, device: DeviceKind, network: Network) -> Row:
    total, w = work.trained + work.frozen, work.weight_bytes
    sharded_weights = name.startswith("fsdp") or "zero" in name
    # Sharded trained weights are fp32 and their own masters; DDP holds low-precision weights beside fp32 masters.
    stored = (4 * work.trained + w * work.frozen) / shard if sharded_weights else w * total
    # Gathered at the same time: two units for fsdp (one computes, one arrives), everything for ZeRO-1.
    if name.startswith("fsdp"):
        stored += 2 * w * work.unit
    elif sharded_weights:
        stored += w * total
    gradients = (4 if sharded_weights else w) * work.trained / shard
    masters = 0 if sharded_weights or w == 4 else 4 * work.trained
    optimizer = (8 * work.trained + masters) / shard
    inside, across = _traffic(work, name, shard, world, network)
    compute = work.seconds / REACHED + ADAM_BYTES * work.trained / shard / max(device.bandwidth, 1.0)
    link = max(device.link, 1.0) * LINK_REACHED
    wire = inside / link + across / (network.across * LINK_REACHED)
    hidden = compute * (1.0 if sharded_weights else BACKWARD)
    exposed = max(0.0, wire - hidden)
    memory = stored + gradients + optimizer + work.activations
    return Row(
        name, stored, gradients, optimizer, work.activations, inside, across, compute + exposed, exposed,
        memory <= 0.92 * device.memory,
    )  # fmt: skip


def _traffic(work: Workload, name: str, shard: int, world: int, network: Network) -> tuple[float, float]:
    """Bytes that a rank sends within and between machines in a step."""
    gathered, reduced = work.weight_bytes * (work.trained + work.frozen), work.reduce_bytes * work.trained
    if name == "ddp":
        volume = 2 * (world - 1) / world * work.weight_bytes * work.trained
    else:
        times = 2 if name.startswith("fsdp") else 1
        volume = (shard - 1) / shard * (times * gathered + reduced)
    spans = (world if name == "ddp" else shard) > network.per_node
    inside, across = (0.0, volume) if spans else (volume, 0.0)
    copies = world // shard
    if name != "ddp" and copies > 1:
        across += 2 * (copies - 1) / copies * reduced / shard
    return inside, across


def table(work: Workload, world: int, device: DeviceKind, network: Network | None = None) -> str:
    """The rows as text, with the assumptions under them."""
    network = network or Network()
    nodes = -(-world // network.per_node)
    machines = f"{nodes} machine{'s' if nodes > 1 else ''} of {min(world, network.per_node)}"
    lines = [
        f"{work.name} on {world} × {device.label} ({machines}), a rank:",
        f"{'strategy':<28}{'weights':>9}{'grads':>8}{'optim':>8}{'activ':>8}{'memory':>9}{'sent in':>9}{'sent out':>9}"
        f"{'step':>9}{'waits':>8}",
    ]
    for row in estimate(work, world, device, network):
        sizes = (row.weights, row.gradients, row.optimizer, row.activations)
        cells = "".join(f"{size / GIB:>{width}.1f}" for size, width in zip(sizes, (9, 8, 8, 8)))
        note = "" if row.fits else f"  does not fit into {device.memory / 1e9:.0f} GB"
        lines.append(
            f"{row.strategy:<28}{cells}{row.memory / GIB:>9.1f}{row.inside / GIB:>9.1f}{row.across / GIB:>9.1f}"
            f"{row.seconds * 1e3:>7.0f}ms{row.exposed * 1e3:>6.0f}ms{note}"
        )
    lines.append(
        f"GiB; expected, not measured: {REACHED:.0%} of the roofline, {LINK_REACHED:.0%} of {device.link / 1e9:.0f} "
        f"GB/s inside a machine and {network.across / 1e9:.0f} GB/s between; 'waits' is what compute cannot hide."
    )
    return "\n".join(lines)


def markdown(works: Sequence[tuple[Workload, int]], device: DeviceKind, worlds: Sequence[int]) -> str:
    """Tables for several workloads, (workload, batch a device), on several sizes."""
    parts = []
    for work, batch in works:
        lines = [
            f"### {work.name}, batch {batch} a device\n",
            "| devices | strategy | memory | sent inside | sent between | step | samples/s |",
            "|---|---|---|---|---|---|---|",
        ]
        for world in worlds:
            for row in estimate(work, world, device):
                fits = f"{row.memory / GIB:.0f} GiB" + ("" if row.fits else " (too much)")
                rate = f"{world * batch / row.seconds:.0f}" if row.fits else "-"
                sent = f"{row.inside / GIB:.1f} GiB | {row.across / GIB:.1f} GiB"
                lines.append(f"| {world} | `{row.strategy}` | {fits} | {sent} | {row.seconds * 1e3:.0f} ms | {rate} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
