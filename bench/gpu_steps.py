"""Training steps of one model on a GPU, a line a variant: the published recipe, eager, each pass, growing batches.

What is compared first runs first, so that a run that is cut off has the figure that counts: recipe, eager model, whole
plan; then the passes between, then the whole plan at growing batch sizes until memory ends. The record is rewritten
after each line. A process whose device is lost, or that hangs, ends with code 3; started again with the same record it
goes on behind the variant that did it. `bench.gpu` does that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vlaforge.bench.record import conditions, plan_facts, record_path, rewrite_record, said
from vlaforge.bench.restated import Restated
from vlaforge.bench.sides import Case, Ours, Side, full_case
from vlaforge.graphs import PlanOptions, registry
from vlaforge.graphs.cost import step_cost
from vlaforge.graphs.devices import GIB, detect

LOST = 3
"""Exit code: the device or the time of one variant is gone, the others may go on in a new process."""
VIEWS, PROMPT = 2, 50
"""Filled camera slots (of three), and valid prompt tokens (of 200): the case as shipped."""
ORDER = ("fuse", "pack", "trim_tokens", "hoist", "optimizer", "overlap", "compile_blocks", "graph_step")
COMPILING_S, PLAIN_S = 90.0, 25.0
"""What a variant is thought to take before one of its kind was measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pi05")
    parser.add_argument("--preset", default=None, help="a smaller one, to try this out (on a CPU too)")
    parser.add_argument("--batch-size", type=int, default=16, help="of the variants that are compared")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a variant")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (a graph is recorded in the fourth)")
    parser.add_argument("--seconds", type=float, default=600, help="start nothing that would end later")
    parser.add_argument("--patience", type=float, default=170, help="seconds after which a variant counts as hanging")
    parser.add_argument("--record", type=Path, default=None, help="the record; what it holds is not measured again")


@dataclass(frozen=True)
class Variant:
    """One line of the table; `options` is None for the recipe."""

    name: str
    batch: int
    build: Callable[[Case], Side]
    options: PlanOptions | None

    @property
    def key(self) -> str:
        return f"{self.name} @ {self.batch}"

    @property
    def compiles(self) -> bool:
        return self.options is not None and "compile_blocks" not in self.options.without


def ladder() -> list[tuple[str, PlanOptions]]:
    """The eager bf16 model, then each pass that only a plan for a GPU has, added in the plan's order."""
    every = [rule.name for rule in registry()]
    found = []
    for count in range(len(ORDER) + 1):
        on = {"freeze", "precision", *ORDER[:count]}
        if "trim_tokens" in on:
            on.add("static_shapes")
        without = tuple(name for name in every if name not in on)
        name = f"+ {ORDER[count - 1]}" if count else "eager"
        found.append((name, PlanOptions(dtype="bf16", device="auto", compile="on", without=without)))
    return found


def variants(model: str, batch: int, device: torch.device) -> list[Variant]:
    """In the order in which they run; a recipe is restated for π0.5."""
    rungs = [Variant(name, batch, partial(_ours, name, options), options) for name, options in ladder()]
    eager, *between, whole = rungs
    recipe = Variant("official recipe", batch, lambda case: Restated(case, torch.bfloat16, device), None)
    larger = [Variant("whole plan", batch * factor, whole.build, whole.options) for factor in (2, 4, 8)]
    return [*([recipe] if model == "pi05" else []), eager, whole, *between, *larger]


def _ours(name: str, options: PlanOptions, case: Case) -> Ours:
    return Ours(name, case, options)


def run(args: argparse.Namespace) -> int:
    until = time.monotonic() + args.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table(args, device)
    todo = variants(args.model, args.batch_size, device)
    print(f"{args.model} · bf16 · {VIEWS} cameras, {PROMPT} prompt tokens filled · n {args.steps}")
    print(f"{'':<26}{'batch':>6}{'ms':>9}{'p95':>9}{'samples/s':>11}{'GiB':>8}{'of peak':>9}{'loss':>10}", flush=True)
    for variant in todo:
        if variant.key in table.rows or table.memory_ended(variant):
            continue
        if variant.key in table.body["began"]:
            table.add(variant, {"error": "its process ended or hung"})
        elif time.monotonic() + table.expected(variant) > until:
            print(f"{variant.name:<26}{variant.batch:>6}  left out: the time is up", flush=True)
        elif not table.measure(variant):
            return LOST
    print(f"record: {table.path}")
    print(*(f"the plan is {ratio:.2f} × as fast as {name}" for name, ratio in table.ratios().items()), sep="\n")
    return 0


class Table:
    """The rows so far, as the record on the disk has them."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args, self.device = args, device
        self.path = args.record or record_path(Path(__file__).parent / "results", f"gpu-{args.model}")
        if self.path.exists():
            self.body = json.loads(self.path.read_text())
        else:
            case = {"views": VIEWS, "prompt": PROMPT, "preset": args.preset or "full"}
            sizes = {"dtype": "bf16", "warmup": args.warmup, "steps": args.steps}
            self.body = {**conditions(), **_gpu(device), "model": args.model, **sizes, "case": case}
            self.body |= {"rows": [], "began": []}
        self._per_sample: dict[bool, float] = {}

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {f"{row['name']} @ {row['batch']}": row for row in self.body["rows"]}

    def add(self, variant: Variant, result: dict[str, Any]) -> None:
        row = {"name": variant.name, "batch": variant.batch, "compiles": variant.compiles, **result}
        self.body["rows"].append(row)
        rewrite_record(self.path, self.body)
        print(line_of(row), flush=True)

    def memory_ended(self, variant: Variant) -> bool:
        """Whether a smaller batch of the whole plan had no room already."""
        rows = self.rows.values()
        return any(r["name"] == variant.name and r["batch"] < variant.batch and "error" in r for r in rows)

    def expected(self, variant: Variant) -> float:
        """Seconds that the variant may take: what the slowest of its kind took, and some."""
        taken = [row["taken"] for row in self.body["rows"] if "taken" in row and row["compiles"] == variant.compiles]
        return 1.2 * max(taken) if taken else COMPILING_S if variant.compiles else PLAIN_S

    def ratios(self) -> dict[str, float]:
        """Step time of the others over that of the whole plan, at the same batch."""
        rows = self.rows
        size = self.args.batch_size
        best = rows.get(f"+ {ORDER[-1]} @ {size}", {})
        others = {name: rows.get(f"{name} @ {size}", {}) for name in ("official recipe", "eager")}
        return {name: row["p50"] / best["p50"] for name, row in others.items() if "p50" in row and "p50" in best}

    def measure(self, variant: Variant) -> bool:
        """Builds the side, warms it up, times it, frees it; False when the device answers no more."""
        self.body["began"].append(variant.key)
        rewrite_record(self.path, self.body)
        watch = threading.Timer(self.args.patience, os._exit, (LOST,))
        watch.daemon = True
        watch.start()
        began = time.monotonic()
        try:
            result = self._time(variant)
            if "error" not in result and variant.options is not None:
                flops = self._flops(variant)
                result |= {"flops": flops, "of_peak": flops / result["p50"] / (detect().bf16 or float("inf"))}
        finally:
            watch.cancel()
        self.add(variant, {**result, "taken": round(time.monotonic() - began, 1)})
        return "error" not in result or self._alive()

    def _time(self, variant: Variant) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        side = None
        try:
            case = self._case(variant.batch)
            side = variant.build(case)
            warm, timed = side.run(self.args.warmup), side.run(self.args.steps)
            peak = torch.cuda.max_memory_allocated() if cuda else 0
            result: dict[str, Any] = {**timed.summary(), "losses": warm.losses + timed.losses, "peak": peak}
            result["samples_per_s"] = variant.batch / result["p50"]
            if isinstance(side, Ours):
                result["plan"] = plan_facts(side.plan)
        except Exception as error:  # whatever a kernel or compiler raises is a line of the table
            result = {"error": said(error)}
        del side
        gc.collect()
        torch.compiler.reset()
        if cuda and self._alive():
            torch.cuda.empty_cache()
        return result

    def _case(self, batch: int) -> Case:
        return full_case(self.args.model, batch, VIEWS, PROMPT, preset=self.args.preset)

    def _alive(self) -> bool:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _flops(self, variant: Variant) -> float:
        """Of a step; counted once with and once without the cuts, at two samples: work grows with the batch."""
        trimmed = "trim_tokens" not in variant.options.without
        if trimmed not in self._per_sample:
            case = self._case(2)
            with torch.device("meta"):
                model = case.family.model(case.config)
            options = PlanOptions(dtype="bf16", compile="off", batch_size=2, without=variant.options.without)
            self._per_sample[trimmed] = step_cost(model, case.contract, options, case.sizes)[0].total.flops / 2
        return self._per_sample[trimmed] * variant.batch


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    return {"gpu": torch.cuda.get_device_name(0), "memory": torch.cuda.mem_get_info()[1], "cuda": torch.version.cuda}


def line_of(row: dict[str, Any]) -> str:
    head = f"{row['name']:<26}{row['batch']:>6}"
    if "error" in row:
        return f"{head}  {row['error']}"
    peak = f"{row['of_peak']:9.1%}" if "of_peak" in row else f"{'':9}"
    return (
        f"{head}{row['p50'] * 1e3:9.1f}{row['p95'] * 1e3:9.1f}{row['samples_per_s']:11.1f}"
        f"{row['peak'] / GIB:8.1f}{peak}{row['losses'][-1]:10.4f}"
    )
