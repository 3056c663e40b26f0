"""Time that training stands still for a checkpoint, for each format, in the foreground and in the background.

    forge-bench save --megabytes 800 --formats safetensors,dcp

A small training loop (matrix products of a stack of linear layers, fused AdamW with a running average) saves every few
steps through the run's own `Checkpoints`: weights, average, optimiser state, hashes, sync to the disk. Reported for
each way of saving:

    stall      inside the call that saves: what the loop waits for (median and worst)
    write      from the call until the folder has its name
    drag       how much longer steps take while a background writer runs, beside undisturbed ones (median)
    cost       total time of the loop over that of one without checkpoints, for each checkpoint
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from vlaforge.bench.record import conditions, write_record
from vlaforge.data.errors import UserError, unknown
from vlaforge.runtime.checkpoint.formats import FORMATS
from vlaforge.runtime.checkpoint.store import Checkpoints, Content
from vlaforge.runtime.ema import Ema
from vlaforge.runtime.optim import Group, Hyper, Optimizer, build_optimizer

BYTES_A_PARAMETER = 16  # fp32 weight, average, two moments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=400, help="size of one checkpoint (default: 400)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="which, by comma (default: all)")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints a way of saving (default: 5)")
    parser.add_argument("--steps", type=int, default=12, help="steps between checkpoints (default: 12)")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--record", default=None, metavar="DIR", help="write the numbers there as JSON")


class Loop:
    """The training loop that is saved."""

    def __init__(self, megabytes: float):
        torch.manual_seed(0)
        width = 1024
        count = max(1, round(megabytes * 1e6 / BYTES_A_PARAMETER / width**2))
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        self.input = torch.randn(16, width)
        group = Group("base", 1e-4, 0.0, 0.0, dict(self.net.named_parameters()))
        self.optimizer: Optimizer = build_optimizer("ForgeAdamW", [group], Hyper())
        self.ema = Ema(self.optimizer, 0.999)
        self.lr, self.one, self.yes = torch.tensor([1e-4]), torch.tensor(1.0), torch.tensor(True)

    def step(self) -> float:
        """One step; returns its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.net(self.input).square().mean().backward()
        self.optimizer.step(self.lr, self.one, self.yes)
        return time.perf_counter() - began

    def content(self, step: int) -> Content:
        model = {name: p.detach() for name, p in self.net.named_parameters()}
        groups = {"model": model, "ema": self.ema.tensors(), "optim": self.optimizer.state_tensors()}
        return Content(step, groups)


def measure(
    loop: Loop, folder: Path, form: str, background: bool, saves: int, steps: int, quiet: float
) -> dict[str, Any]:
    """One way of saving; `quiet` is the median undisturbed step in seconds."""
    store = Checkpoints(folder, format=form, keep=1, background=background)
    stalls, writes, busy = [], [], []
    began = time.perf_counter()
    taken = 0
    for save in range(saves):
        called = time.perf_counter()
        store.save(loop.content(save))
        stalls.append(time.perf_counter() - called)
        if not background:
            writes.append(stalls[-1])
        for _ in range(steps):
            running = store.writing
            seconds = loop.step()
            taken += 1
            if running and store.writing:
                busy.append(seconds)
            if background and len(writes) == save and not store.writing:
                writes.append(time.perf_counter() - called)
    store.wait()
    elapsed = time.perf_counter() - began
    size = sum(path.stat().st_size for path in store.listed()[-1][1].rglob("*") if path.is_file())
    return {
        "format": form,
        "mode": "async" if background else "sync",
        "megabytes": size / 1e6,
        "stall_ms": 1e3 * median(stalls),
        "stall_worst_ms": 1e3 * max(stalls),
        "write_ms": 1e3 * median(writes) if writes else None,
        "drag": median(busy) / quiet if busy else None,
        "cost_ms": 1e3 * (elapsed - taken * quiet) / saves,
        "saves": saves,
        "steps_between": steps,
    }


def run(args: argparse.Namespace) -> int:
    wanted = [name.strip() for name in args.formats.split(",")]
    for name in wanted:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if args.megabytes <= 0 or args.saves < 1 or args.steps < 1:
        raise UserError("--megabytes, --saves and --steps must be above 0.")
    loop = Loop(args.megabytes)
    quiet = median([loop.step() for _ in range(20)][5:])
    base = Path(args.folder) if args.folder else Path(tempfile.mkdtemp(prefix="vlaforge-save-"))
    rows = []
    try:
        for name in wanted:
            for background in (False, True):
                target = base / f"{name}-{'async' if background else 'sync'}"
                rows.append(measure(loop, target, name, background, args.saves, args.steps, quiet))
                shutil.rmtree(target, ignore_errors=True)
    finally:
        if not args.folder:
            shutil.rmtree(base, ignore_errors=True)
    print(table(rows, quiet))
    if args.record:
        body = {"conditions": conditions(), "quiet_step_ms": 1e3 * quiet, "rows": rows}
        print(write_record(Path(args.record), "save", body))
    return 0


def table(rows: list[dict[str, Any]], quiet: float) -> str:
    """The rows as text."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    lines = [
        f"undisturbed step {1e3 * quiet:.0f} ms; {rows[0]['saves']} checkpoints {rows[0]['steps_between']} steps apart",
        f"{'':<20}{'MB':>7}{'stall ms':>10}{'worst':>8}{'write ms':>10}{'drag':>7}{'cost ms':>9}",
    ]
    for row in rows:
        drag = "-" if row["drag"] is None else f"{row['drag']:.2f}"
        lines.append(
            f"{row['format'] + ' ' + row['mode']:<20}{row['megabytes']:>7.0f}{ms(row['stall_ms']):>10}"
            f"{ms(row['stall_worst_ms']):>8}{ms(row['write_ms']):>10}{drag:>7}{ms(row['cost_ms']):>9}"
        )
    return "\n".join(lines)
