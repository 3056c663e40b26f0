"""Everything that only a GPU can show, in one call of under ten minutes: tests, kernels, and full-size training steps.

`bench/gpu.sh` runs it from a checkout, with nothing installed or fetched (torch, triton, numpy, safetensors, pyyaml and
pytest must be there). Each part has a share of the time budget and writes its record when it ends, so that a run that
is cut off keeps what it has. The table of steps has one line a variant: the published recipe (`bench.restated`), the
eager model, then each pass added, and the whole plan at growing batch sizes until memory ends.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vlaforge.bench.record import conditions, write_record
from vlaforge.bench.restated import Restated
from vlaforge.bench.sides import Case, Ours, full_case
from vlaforge.graphs import PlanOptions, registry
from vlaforge.graphs.cost import step_cost
from vlaforge.graphs.devices import GIB, detect

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
TESTS_S, KERNELS_S = 150, 120
"""Most seconds for the tests and for the kernel benchmark."""
VIEWS, PROMPT = 2, 50
"""Filled camera slots (of three), and valid prompt tokens (of 200): the case as shipped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pi05")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    parser.add_argument("--batch-size", type=int, default=16, help="of the variants that are compared")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a variant")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (a graph is recorded in the fourth)")
    parser.add_argument("--parts", default="tests,kernels,steps", help="what to run, by name")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the records")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("forge-bench gpu: no CUDA device; the same code paths are tested on the CPU (make test).")
        return 2
    until = time.monotonic() + args.budget
    parts = args.parts.split(",")
    print(f"{torch.cuda.get_device_name(0)} · torch {torch.__version__} · {detect().label}")
    failed = 0
    if "tests" in parts:
        folders = [str(ROOT / "tests" / name) for name in ("kernels", "graphs")]
        line = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *folders]
        failed += command("tests", line, TESTS_S)
    if "kernels" in parts:
        line = [sys.executable, "-P", "-m", "vlaforge.bench.cli", "kernels", "--output", str(args.output)]
        failed += command("kernels", line, KERNELS_S)
    if "steps" in parts:
        steps(args, until)
    return 1 if failed else 0


def command(name: str, line: list[str], seconds: float) -> int:
    """Runs a part as a process of its own, with its output on ours; 1 when it failed or ran out of time."""
    began = time.monotonic()
    try:
        code = subprocess.run(line, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        print(f"[{name}] stopped after {seconds:.0f} s")
        return 1
    print(f"[{name}] exit {code} after {time.monotonic() - began:.0f} s", flush=True)
    return int(code != 0)


# ---------------------------------------------------------------------------------------------------- steps


def steps(args: argparse.Namespace, until: float) -> None:
    """The table of training steps; each line is printed and recorded as soon as it is there."""
    rows: list[dict[str, Any]] = []
    case = full_case(args.model, args.batch_size, VIEWS, PROMPT)
    print(f"\n{case.family.name} · bf16 · {VIEWS} of 3 cameras, {PROMPT} of 200 prompt tokens · n {args.steps}")
    print(f"{'':<26}{'batch':>6}{'ms':>9}{'p95':>9}{'samples/s':>11}{'GiB':>8}{'of peak':>9}{'loss':>10}", flush=True)
    variants: list[tuple[str, int, Callable[[Case], Any], PlanOptions | None]] = [
        ("official recipe", args.batch_size, lambda c: Restated(c, torch.bfloat16, torch.device("cuda")), None)
    ]
    for name, options in ladder():
        variants.append((name, args.batch_size, lambda c, n=name, o=options: Ours(n, c, o), options))
    whole = variants[-1][3]
    for factor in (2, 4, 8):
        size = args.batch_size * factor
        variants.append(("whole plan", size, lambda c, o=whole: Ours("whole plan", c, o), whole))
    for name, size, build, options in variants:
        if time.monotonic() > until - 20:
            print(f"{name:<26}{size:>6}  left out: the time is up")
            continue
        sized = case if size == case.batch_size else full_case(args.model, size, VIEWS, PROMPT)
        row = measure(args, name, sized, build, options)
        rows.append(row)
        print(line_of(row), flush=True)
        record(args, rows)
        if row.get("error") and size > args.batch_size:
            break


def ladder() -> list[tuple[str, PlanOptions]]:
    """The eager bf16 model, then each pass that only a plan for a GPU has, added in the plan's order."""
    order = ["fuse", "pack", "trim_tokens", "hoist", "optimizer", "overlap", "compile_blocks", "graph_step"]
    every = [rule.name for rule in registry()]
    found = []
    for count in range(len(order) + 1):
        on = {"freeze", "precision", *order[:count]}
        if "trim_tokens" in on:
            on.add("static_shapes")
        without = tuple(name for name in every if name not in on)
        name = f"+ {order[count - 1]}" if count else "eager"
        found.append((name, PlanOptions(dtype="bf16", device="auto", compile="on", without=without)))
    return found


def measure(
    args: argparse.Namespace, name: str, case: Case, build: Callable[[Case], Any], options: PlanOptions | None
) -> dict[str, Any]:
    """One line: builds the side, warms it up, times it, and frees everything again."""
    row: dict[str, Any] = {"name": name, "batch": case.batch_size}
    torch.cuda.reset_peak_memory_stats()
    side = None
    try:
        side = build(case)
        warm = side.run(args.warmup)
        timed = side.run(args.steps)
        row |= {**timed.summary(), "losses": warm.losses + timed.losses, "peak": torch.cuda.max_memory_allocated()}
        row["samples_per_s"] = case.batch_size / row["p50"]
        if isinstance(side, Ours):
            row["plan"] = side.plan.json()
    except (RuntimeError, torch.OutOfMemoryError) as error:
        row["error"] = str(error).splitlines()[0][:160]
    finally:
        if side is not None:
            side.close()
        del side
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()
    if options is not None and "error" not in row:
        with torch.device("meta"):
            model = case.family.model(case.config)
        sized = PlanOptions(dtype="bf16", device="auto", compile="off", batch_size=case.batch_size,
                            without=options.without)  # fmt: skip
        row["flops"] = step_cost(model, case.contract, sized, case.sizes)[0].total.flops
        row["of_peak"] = row["flops"] / row["p50"] / detect().bf16
    return row


def line_of(row: dict[str, Any]) -> str:
    head = f"{row['name']:<26}{row['batch']:>6}"
    if "error" in row:
        return f"{head}  {row['error']}"
    peak = f"{row['of_peak']:9.1%}" if "of_peak" in row else f"{'':9}"
    return (
        f"{head}{row['p50'] * 1e3:9.1f}{row['p95'] * 1e3:9.1f}{row['samples_per_s']:11.1f}"
        f"{row['peak'] / GIB:8.1f}{peak}{row['losses'][-1]:10.4f}"
    )


def record(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    body = {
        **conditions(),
        "gpu": torch.cuda.get_device_name(0),
        "driver_memory": torch.cuda.mem_get_info()[1],
        "model": args.model,
        "dtype": "bf16",
        "warmup": args.warmup,
        "steps": args.steps,
        "case": {"views": VIEWS, "slots": 3, "prompt": PROMPT, "padded": 200},
        "rows": rows,
    }
    for old in args.output.glob(f"gpu-{args.model}-*.json"):
        if old.stat().st_mtime > _started:
            old.unlink()
    write_record(args.output, f"gpu-{args.model}", body)


_started = time.time()
