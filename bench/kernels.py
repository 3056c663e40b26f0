"""Kernels: on a GPU, time and bytes/s beside torch.compile and eager; anywhere, what each needs as machine code.

``--static`` cross-compiles every launch of every op's real shapes for sm_80, sm_90 and sm_100, without a GPU, and fails
when one spills registers or wants more shared memory than the chip has. Without it a CUDA device is needed: each case
is compared with its reference first, and a wrong one fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlaforge.bench.record import conditions, record_path, rewrite_record, said, write_record
from vlaforge.data.errors import UserError, unknown
from vlaforge.kernels import check
from vlaforge.kernels.spec import HAS_TRITON, INTERPRET, Case, KernelSpec, available, use
from vlaforge.kernels.static import ARCHITECTURES, Build, builds

SMALL = {"B": 2, "N": 64, "layers": 1}
"""Axes that the comparison before the timing shortens, so that its fp32 reference fits any card."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--static", action="store_true", help="compile for three GPU generations; needs no GPU")
    parser.add_argument("--op", action="append", metavar="NAME", help="only this op (may be given several times)")
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile (--static)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of what is timed")
    parser.add_argument("--seconds", type=float, default=100, help="start no further case after so long")
    parser.add_argument("--output", type=Path, default=None, help="folder for the JSON record")


def run(args: argparse.Namespace) -> int:
    names = args.op or list(available())
    for name in names:
        if name not in available():
            raise unknown("op", name, available())
    if not HAS_TRITON:
        raise UserError("Triton is not installed here: pip install triton (Linux only).")
    if INTERPRET:
        raise UserError("TRITON_INTERPRET is set, and an interpreted kernel is neither compiled nor timed: unset it.")
    if args.static:
        return static(names, args)
    if not torch.cuda.is_available():
        raise UserError(
            "Timing kernels needs a CUDA device, and there is none. On this machine `forge-bench kernels --static` "
            "compiles them for sm_80, sm_90 and sm_100, and `pytest tests/kernels` runs them in Triton's interpreter."
        )
    return timed(names, args)


# ---------------------------------------------------------------------------------------------------- static


def static(names: list[str], args: argparse.Namespace) -> int:
    """The table of registers and shared memory; 1 when a kernel is over a limit."""
    found: list[Build] = []
    for part in _parts(names, tuple(args.arch), min(args.jobs, len(names))):
        _print_builds(part, args.arch, head=not found)
        found += part
    faults = [(build, fault) for build in found for fault in build.faults]
    for build, fault in faults:
        print(f"fault: {build.op} {build.kernel} sm_{build.architecture} {build.dtype} {build.config}: {fault}")
    chips = [(arch, *ARCHITECTURES[arch]) for arch in args.arch]
    limits = ", ".join(f"sm_{arch} {most // 1024} KiB ({gpus})" for arch, gpus, most in chips)
    print(f"{len(found)} builds of {len(names)} ops, {len(faults)} faults; shared memory a program: {limits}")
    if args.output:
        body = {"builds": [{**asdict(b), "faults": b.faults} for b in found]}
        print(f"record: {write_record(args.output, 'kernels-static', {**conditions(), **body})}")
    return 1 if faults else 0


def _parts(names: list[str], architectures: tuple[int, ...], jobs: int) -> Iterator[list[Build]]:
    """Each op's builds, in order, compiled by `jobs` processes."""
    if jobs < 2:
        yield from (_builds(name, architectures) for name in names)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(_builds, names, [architectures] * len(names))


def _builds(name: str, architectures: tuple[int, ...]) -> list[Build]:
    return list(builds(available()[name], architectures))


def _print_builds(part: list[Build], architectures: list[int], head: bool) -> None:
    """A line a kernel and configuration: registers/shared bytes for each architecture, ``!`` where it is a fault."""
    if head:
        columns = "".join(f"{f'sm_{arch}':>12}" for arch in architectures)
        print(f"{'op':<21}{'kernel':<16}{'dtype':<9}{columns}  configuration (registers/shared bytes; first case)")
    lines: dict[tuple, list[Build]] = defaultdict(list)
    for build in part:
        lines[build.op, build.kernel, build.dtype, build.config].append(build)
    for (op, kernel, dtype, config), same in lines.items():
        cells = []
        for arch in architectures:
            # several specialisations (strides, alignment) of one configuration: the hungriest stands for all
            worst = max((b for b in same if b.architecture == arch), key=lambda b: (bool(b.faults), b.registers))
            cells.append(f"{'!' if worst.faults else ''}{worst.registers}/{worst.shared}")
        row = "".join(f"{cell:>12}" for cell in cells)
        print(f"{op:<21}{kernel:<16}{dtype:<9}{row}  {config} ({same[0].case})", flush=True)


# ---------------------------------------------------------------------------------------------------- timed


@dataclass(frozen=True)
class Timing:
    """One executor on one case, forward alone or with its backward; `least_bytes` is each tensor once."""

    op: str
    case: str
    dtype: str
    executor: str
    what: str
    ms_p50: float
    ms_p95: float
    least_bytes: int

    @property
    def gb_s(self) -> float:
        return self.least_bytes / self.ms_p50 / 1e6


def timed(names: list[str], args: argparse.Namespace) -> int:
    until, dtype = time.monotonic() + args.seconds, getattr(torch, args.dtype)
    print(f"{torch.cuda.get_device_name()} · {args.dtype} · p50 ms (GB/s at the least bytes)")
    print(f"{'op: case':<64}{'':<18}{'ours':>18}{'compiled':>18}{'eager':>18}{'× compiled':>11}", flush=True)
    record = record_path(args.output, "kernels") if args.output else None
    about = {**conditions(), "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    rows: list[Timing] = []
    wrong: list[str] = []
    cases = list(_in_order(names))
    for number, (spec, case) in enumerate(cases):
        if time.monotonic() > until:
            print(f"{len(cases) - number} cases left out after {args.seconds:.0f} s")
            break
        try:
            rows += _compared_and_timed(spec, case, dtype, wrong)
        except Exception as error:  # whatever a kernel or compiler raises: the other ops go on
            wrong.append(f"{spec.name}: {case.name}: {said(error)}")
        if record:
            timings = [{**asdict(row), "gb_s": row.gb_s} for row in rows]
            left = [f"{spec.name}: {case.name}" for spec, case in cases[number + 1 :]]
            rewrite_record(record, {**about, "timings": timings, "wrong": wrong, "left_out": left})
    print(*(f"wrong: {line}" for line in wrong), sep="\n")
    print(f"{len(rows)} timings, {len(wrong)} wrong results" + (f"; record: {record}" if record else ""))
    return 1 if wrong else 0


def _compared_and_timed(spec: KernelSpec, case: Case, dtype: torch.dtype, wrong: list[str]) -> list[Timing]:
    faults = [str(d) for d in check.compare(spec, case.capped(SMALL), dtype, "cuda") if not d.ok]
    wrong += [f"{spec.name}: {case.name}: {fault}" for fault in faults]
    made = list(_timings(spec, case, dtype))
    _print_timings(made)
    torch.cuda.empty_cache()
    return made


def _in_order(names: list[str]) -> Iterator[tuple[KernelSpec, Case]]:
    """Real cases, every op's first one before any second; ops whose reference compiles slowly come last."""
    specs = sorted((available()[name] for name in names), key=lambda spec: spec.timed is not None)
    real = {spec.name: [case for case in spec.cases if not case.name.startswith("odd")] for spec in specs}
    for place in range(max(map(len, real.values()))):
        yield from ((spec, real[spec.name][place]) for spec in specs if place < len(real[spec.name]))


def _timings(spec: KernelSpec, case: Case, dtype: torch.dtype) -> Iterator[Timing]:
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = check.leaves(spec.inputs(case, dtype, torch.device("cuda"), generator), spec.grads)
    ours, reference = spec.timed or (spec.op, spec.reference)
    torch._dynamo.reset()
    compiled = torch.compile(reference)
    sides = {"ours": ("triton", ours), "compiled": ("reference", compiled), "eager": ("reference", reference)}
    for executor, (forced, function) in sides.items():
        with use(forced):
            for what, action, moved in _actions(function, inputs, spec.grads):
                p50, p95 = _time(action)
                yield Timing(spec.name, case.name, str(dtype)[6:], executor, what, p50, p95, moved)


def _actions(
    function: Callable, inputs: dict[str, Any], grads: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], Any], int]]:
    """(what, the call to time, the least bytes that it moves)."""
    result = function(**inputs)
    read = sum(map(_bytes, inputs.values()))
    outputs = [] if result is None else check.outputs_of(result)
    # An op in place writes what it read, but the gradients.
    written = sum(map(_bytes, outputs)) if outputs else read - _bytes(inputs["grads"])
    yield "forward", lambda: function(**inputs), read + written
    wanted = [inputs[name] for name in grads if inputs.get(name) is not None]
    if not wanted:
        return
    outputs = [output for output in outputs if output.requires_grad]
    given = [torch.ones_like(output) for output in outputs]

    def both() -> None:
        made = [output for output in check.outputs_of(function(**inputs)) if output.requires_grad]
        torch.autograd.grad(made, wanted, given, allow_unused=True)

    backward = read + sum(map(_bytes, given)) + sum(map(_bytes, wanted))
    yield "forward+backward", both, read + written + backward


def _bytes(value: Any) -> int:
    """Bytes that a tensor (or list of them) stands on; what is broadcast by a stride of 0 counts once."""
    if isinstance(value, Tensor):
        count = 1
        for size, stride in zip(value.shape, value.stride(), strict=True):
            count *= size if stride else 1
        return count * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _time(action: Callable[[], Any]) -> tuple[float, float]:
    """(p50, p95) in ms, with a cold cache."""
    from triton.testing import do_bench

    p50, p95 = do_bench(action, warmup=20, rep=60, quantiles=[0.5, 0.95])
    return p50, p95


def _print_timings(made: list[Timing]) -> None:
    for what in dict.fromkeys(timing.what for timing in made):
        sides = {timing.executor: timing for timing in made if timing.what == what}
        first = sides["ours"]
        cells = "".join(f"{f'{t.ms_p50:.4f} ({t.gb_s:.0f})':>18}" for t in sides.values())
        ratio = sides["compiled"].ms_p50 / first.ms_p50
        print(f"{f'{first.op}: {first.case}':<64}{what:<18}{cells}{ratio:>10.2f}×", flush=True)
