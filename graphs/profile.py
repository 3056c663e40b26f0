"""Where the time of a training step goes: read from torch's profiler, and written as one page that people read.

    with profiler: step(...)                               each stage of a step inside `stage(name)`
    report = read_profile(profiler, steps, device)
    write_report(report, folder, "steps_10-12")            .json for chrome://tracing or Perfetto, .html, and .txt

Stages are `data`, `forward`, `backward`, `reduce`, `clip`, `optimizer`; what no stage accounts for is `idle` (on a
GPU, when no kernel runs) or `other`. Ops are ranked by their own time, with calls, and with what they reached of the
device's FLOP/s and bytes/s. Bytes are those of an op's inputs and of an output as large as the largest of them, so of
an op that makes much from little less than is true is shown. An op that only calls others moves none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from vlaforge.graphs.check import Report
from vlaforge.graphs.counters import Counts
from vlaforge.graphs.devices import DeviceKind, detect, measured_cpu

PREFIX = "forge/"
STAGES = ("data", "forward", "backward", "reduce", "clip", "optimizer")
REDUCING = ("nccl", "c10d::", "gloo:", "all_reduce", "reduce_scatter", "all_gather")
SIZES = {
    "float": 4, "double": 8, "int": 4, "long int": 8, "long": 8, "bool": 1, "unsigned char": 1, "signed char": 1,
    "c10::BFloat16": 2, "c10::Half": 2, "c10::complex<float>": 8, "short int": 2,
}  # fmt: skip
"""Bytes of an element, by the profiler's names."""
LOW = ("c10::BFloat16", "c10::Half")


def stage(name: str) -> AbstractContextManager[Any]:
    """Marks a stage of a step for the profiler; costs nothing when none is running."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(PREFIX + name)


@dataclass
class Row:
    """One op over all profiled steps: seconds of its own, calls, FLOPs, bytes; `low` when its inputs are 16 bits."""

    name: str
    seconds: float = 0.0
    calls: int = 0
    flops: int = 0
    bytes: int = 0
    low: bool = False

    def roofline(self, device: DeviceKind) -> float:
        """The part of the time that the device's peak rates would need: 1 is perfect, 0 unknown."""
        peak = device.bf16 if self.low else device.fp32
        need = max(self.flops / peak if peak else 0.0, self.bytes / device.bandwidth if device.bandwidth else 0.0)
        return need / self.seconds if self.seconds else 0.0


@dataclass
class ProfileReport:
    """What the page shows; times are means a step in seconds.

    Args:
        split: stage → seconds a step, `other` or `idle` included; their sum is `step_s`.
        rows: ops by time, over all steps.
        counts: graphs, breaks and recompiles since the run began; `recompiles` those inside the window.
        check: host syncs and the like of a watched step; None when none was watched.
        conditions: name → value, for the head of the page.
    """

    steps: int
    step_s: float
    split: dict[str, float]
    rows: list[Row]
    device: DeviceKind
    counts: Counts = field(default_factory=Counts)
    recompiles: int = 0
    check: Report | None = None
    conditions: dict[str, str] = field(default_factory=dict)
    plan: str = ""

    def text(self) -> str:
        """The page's numbers as text: the split, and the first twenty ops."""
        lines = [f"{self.steps} steps of {self.step_s * 1e3:.1f} ms"]
        lines += [f"  {name:<10}{s * 1e3:9.1f} ms{s / self.step_s:7.1%}" for name, s in self.split.items()]
        lines.append(f"{'op':<48}{'ms a step':>10}{'calls':>7}{'GFLOP/s':>9}{'GB/s':>7}{'of peak':>8}")
        for row in self.rows[:20]:
            seconds = row.seconds or 1e-12
            lines.append(
                f"{row.name[:47]:<48}{row.seconds / self.steps * 1e3:10.2f}{row.calls // self.steps:7d}"
                f"{row.flops / seconds / 1e9:9.0f}{row.bytes / seconds / 1e9:7.1f}{row.roofline(self.device):8.0%}"
            )
        lines.append(f"compile: {self.counts.text()}; {self.recompiles} recompiles in the window")
        if self.check is not None:
            lines.append(self.check.text())
        return "\n".join(lines)


def profile_device(device: torch.device) -> DeviceKind:
    """The rates to compare with: the table's for a GPU, this machine's own for a CPU."""
    return detect() if device.type == "cuda" else measured_cpu()


def read_profile(profiler: torch.profiler.profile, steps: int, device: torch.device) -> ProfileReport:
    """The split and the ops of `steps` steps that ran under `profiler` (stopped, with ``record_shapes=True``)."""
    raw = list(profiler.profiler.kineto_results.events())
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in raw if e.duration_ns() > 0]
    wall = (max(end for _, end in spans) - min(start for start, _ in spans)) * 1e-9 if spans else 0.0
    kernels = [e for e in raw if e.device_type() != DeviceType.CPU]
    split = _split(raw, kernels, wall, steps)
    rows = _rows(profiler, kernels)
    return ProfileReport(steps, wall / max(steps, 1), split, rows, profile_device(device))


def _split(raw: Sequence[Any], kernels: Sequence[Any], wall: float, steps: int) -> dict[str, float]:
    """Seconds a step by stage. The time of a reduction inside another stage is taken from that one."""
    totals = dict.fromkeys(STAGES, 0.0)
    for event in raw:
        if event.name().startswith(PREFIX) and event.device_type() == DeviceType.CPU:
            name = event.name().removeprefix(PREFIX)
            totals[name] = totals.get(name, 0.0) + event.duration_ns() * 1e-9
    reducing = _covered(e for e in raw if any(word in e.name().lower() for word in REDUCING))
    exposed = min(reducing, totals["backward"])
    totals["reduce"] += exposed
    totals["backward"] -= exposed
    if kernels:
        totals["idle"] = max(0.0, wall - _covered(kernels))
        for name in STAGES:  # the host's stages overlap the device's time: they share what is not idle
            totals[name] *= (wall - totals["idle"]) / max(sum(totals[key] for key in STAGES), 1e-12)
    else:
        totals["other"] = max(0.0, wall - sum(totals.values()))
    return {name: seconds / max(steps, 1) for name, seconds in totals.items() if seconds > 0}


def _covered(events: Iterable[Any]) -> float:
    """Seconds in which at least one of the events runs."""
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events)
    total, reach = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total * 1e-9


def _rows(profiler: torch.profiler.profile, kernels: Sequence[Any]) -> list[Row]:
    """Ops by their own time: kernels where there are any, with the counts of the ops that launched them."""
    shapes = {e.start_ns(): e for e in profiler.profiler.kineto_results.events() if e.device_type() == DeviceType.CPU}
    origin = profiler.profiler.kineto_results.trace_start_ns()
    found: dict[str, Row] = {}
    for event in profiler.events():
        if event.device_type != DeviceType.CPU or event.name.startswith((PREFIX, "ProfilerStep")):
            continue
        launched = list(event.kernels)
        if kernels and not launched:
            continue
        source = shapes.get(round(event.time_range.start * 1e3) + origin)
        flops = int(event.flops or 0) or (_flops(source) if source is not None else 0)
        whole = source is not None and (flops or not event.cpu_children)
        moved, low = _moved(source) if whole else (0, False)
        name = launched[0].name if launched else event.name
        row = found.setdefault(name, Row(name))
        row.seconds += sum(k.duration for k in launched) * 1e-6 if launched else event.self_cpu_time_total * 1e-6
        row.calls += 1
        row.flops += flops
        row.bytes += moved
        row.low |= low
    return sorted(found.values(), key=lambda row: -row.seconds)


def _moved(event: Any) -> tuple[int, bool]:
    """(bytes of the inputs and of an output like the largest, whether floating inputs have 16 bits)."""
    sizes, low = [], False
    for shape, dtype in zip(event.shapes(), event.dtypes()):
        if dtype in SIZES and shape and all(isinstance(n, int) for n in shape):
            sizes.append(math.prod(shape) * SIZES[dtype])
            low |= dtype in LOW
    return sum(sizes) + max(sizes, default=0), low


def _flops(event: Any) -> int:
    """FLOPs of products that the profiler has no formula of."""
    name, shapes = event.name(), event.shapes()
    if "_linear_pointwise" in name:
        return 2 * math.prod(shapes[0]) * shapes[1][0]
    if "scaled_dot_product" in name and "backward" in name:
        return 10 * math.prod(shapes[1]) * shapes[2][-2]
    if "scaled_dot_product" in name:
        return 4 * math.prod(shapes[0]) * shapes[1][-2]
    return 0


def write_report(
    report: ProfileReport, folder: Path, name: str, profiler: torch.profiler.profile | None = None
) -> Path:
    """Writes ``<name>.html`` and ``.txt``, and ``.json`` (the Chrome trace) from `profiler`; the page's path."""
    from vlaforge.graphs.profile_page import page

    folder.mkdir(parents=True, exist_ok=True)
    if profiler is not None:
        profiler.export_chrome_trace(str(folder / f"{name}.json"))
    (folder / f"{name}.txt").write_text(report.text() + "\n", encoding="utf-8")
    path = folder / f"{name}.html"
    path.write_text(page(report, f"{name}.json" if profiler is not None else None), encoding="utf-8")
    return path
