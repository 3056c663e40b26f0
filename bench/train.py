"""Training steps: each pass added one at a time, and beside an official implementation on the same weights and noise.

Sides take turns in one call. A ratio is of medians; the record holds both sides' conditions.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from vlaforge.bench.peer import Peer
from vlaforge.bench.record import conditions, plan_facts, write_record
from vlaforge.bench.sides import Case, Ours, Timed, fresh_model, interleave, load_case
from vlaforge.data.dtypes import LONG
from vlaforge.data.errors import UserError
from vlaforge.graphs import PlanOptions, registry
from vlaforge.graphs.cost import step_cost

TARGETS = {("as_shipped", "fp32"): 2.0, ("as_shipped", "bf16"): 2.6, ("tight", "fp32"): 1.4, ("tight", "bf16"): 1.8}
"""How many times faster than the official step we want to be on a CPU, mid-size."""
AGREE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of the first step's losses between the two sides."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model family; its `midsize` preset is trained")
    parser.add_argument("--case", default="all", choices=["as_shipped", "tight", "all"])
    parser.add_argument("--dtype", default="all", choices=["fp32", "bf16", "all"])
    parser.add_argument("--ablate", action="store_true", help="add the plan's passes one at a time")
    parser.add_argument("--peer", default=None, help="an official implementation: lerobot")
    parser.add_argument("--peer-python", default=os.environ.get("VLAFORGE_PEER_PYTHON"),
                        help="interpreter with the peer installed (default: $VLAFORGE_PEER_PYTHON)")  # fmt: skip
    parser.add_argument("--peer-compile", action="store_true", help="the peer also under its own compile option")
    parser.add_argument("--no-compile", action="store_true", help="our side without compile_blocks")
    parser.add_argument("--steps", type=int, default=4, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each side")
    parser.add_argument("--profile", type=Path, default=None, help="folder for a profile of one step of each side")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--output", type=Path, default=None, help="folder for the JSON records")


def run(args: argparse.Namespace) -> int:
    if args.peer and not args.peer_python:
        raise UserError("--peer needs an interpreter that has it: give --peer-python or set VLAFORGE_PEER_PYTHON.")
    torch.set_num_threads(args.threads)
    cases = ["as_shipped", "tight"] if args.case == "all" else [args.case]
    dtypes = ["fp32", "bf16"] if args.dtype == "all" else [args.dtype]
    ok = True
    for name in cases:
        case = load_case(args.model, name)
        for dtype in dtypes:
            print(f"\n{case.family.name} · {name} · {dtype} · batch {case.batch_size} · {args.threads} threads")
            if args.ablate:
                ablate(args, case, dtype)
            if args.peer or not args.ablate:
                ok &= compare(args, case, dtype)
    return 0 if ok or not args.check else 1


def options_of(args: argparse.Namespace, dtype: str, without: tuple[str, ...] = ()) -> PlanOptions:
    return PlanOptions(dtype=dtype, device="cpu", compile="off" if args.no_compile else "on", without=without)


def compare(args: argparse.Namespace, case: Case, dtype: str) -> bool:
    """Our whole plan, beside the peer when there is one; prints a table, and says whether the target is met."""
    state = {name: value.clone() for name, value in fresh_model(case).state_dict().items()}
    ours = Ours("ours", case, options_of(args, dtype), state)
    full = LONG[dtype]
    if not args.peer:
        warm, measured = interleave([ours], args.rounds, args.steps, args.warmup)
        print(table(measured, "ours"))
        save(args, f"train-{case.family.name}", case, dtype, ours, warm, measured, {})
        return True
    with Peer(args.peer, args.peer_python, case, state, full, args.threads) as peer:
        sides = [ours, peer]
        if args.peer_compile:
            options = {"compile_model": True, "compile_mode": "default"}
            compiled = Peer(f"{args.peer} compiled", args.peer_python, case, state, full, args.threads, options=options)
            sides.append(compiled)
        about = peer.about()
        warm, measured = interleave(sides, args.rounds, args.steps, args.warmup)
        if args.profile:
            profile(args.profile, f"{case.name}-{dtype}", ours, peer)
        if args.peer_compile:
            compiled.__exit__()
    print(table(measured, args.peer))
    return verdict(args, case, dtype, ours, warm, measured, about)


def verdict(
    args: argparse.Namespace, case: Case, dtype: str, ours: Ours, warm: dict, measured: dict, about: dict
) -> bool:
    """Says how losses agree and whether the target is met; writes the record."""
    first = [warm[name].losses[0] for name in ("ours", args.peer)]
    differ = abs(first[0] - first[1]) / abs(first[1])
    agreed = differ <= AGREE[dtype]
    print(f"first losses {first[0]:.6f} and {first[1]:.6f}: {differ:.1e} apart ({'agree' if agreed else 'DIFFER'})")
    last = [warm[name].losses[-1] for name in ("ours", args.peer)]
    apart = abs(last[0] - last[1]) / abs(last[1])
    print(f"losses after {args.warmup - 1} updates {last[0]:.6f} and {last[1]:.6f}: {apart:.1e} apart")
    ratio = measured[args.peer].summary()["p50"] / measured["ours"].summary()["p50"]
    target = TARGETS[case.name, dtype]
    print(f"{ratio:.2f} times faster than {args.peer} (target {target}: {'met' if ratio >= target else 'MISSED'})")
    spent = [measured[name].summary().get("cpu_p50") for name in (args.peer, "ours")]
    cpu_ratio = spent[0] / spent[1] if all(spent) else None
    if cpu_ratio:
        print(f"{cpu_ratio:.2f} times less CPU time a step")
    extra = {
        "peer": about,
        "first_losses": first,
        "last_warmup_losses": last,
        "ratio": ratio,
        "cpu_ratio": cpu_ratio,
        "target": target,
    }
    save(args, f"train-{case.family.name}-{args.peer}", case, dtype, ours, warm, measured, extra)
    return agreed and ratio >= target


def ablate(args: argparse.Namespace, case: Case, dtype: str) -> None:
    """The plan's passes added one at a time, all variants taking turns; FLOPs and bytes of each from the cost model."""
    whole = Ours("all", case, options_of(args, dtype)).plan
    active = [entry.name for entry in whole.entries if entry.state == "on"]
    every = [rule.name for rule in registry()]
    sides, costs, before = [], {}, "eager"
    for count in range(len(active) + 1):
        added = active[:count]
        options = options_of(args, dtype, tuple(name for name in every if name not in added))
        name = f"+ {added[-1]}" if added else before
        sides.append(Ours(name, case, options))
        with torch.device("meta"):
            model = case.family.model(case.config)
        costs[name] = step_cost(model, case.contract, PlanOptions(**{**_plain(options), "batch_size": case.batch_size}),
                                case.sizes)[0].total  # fmt: skip
    warm, measured = interleave(sides, args.rounds, args.steps, args.warmup)
    print(table(measured, "eager", costs))
    extra = {"costs": {name: vars(cost) for name, cost in costs.items()}}
    save(args, f"ablate-{case.family.name}", case, dtype, sides[-1], warm, measured, extra)


def _plain(options: PlanOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("dtype", "device", "compile", "without")}


def table(measured: dict[str, Timed], base: str, costs: dict[str, Any] | None = None) -> str:
    """A line a side: median, p95 and best step in ms, median CPU time, and how many times faster than `base`; counts
    where given."""
    width = max(map(len, measured))
    head = f"{'':<{width}}{'p50 ms':>9}{'p95 ms':>9}{'min ms':>9}{'cpu ms':>9}{'n':>5}{'faster':>8}"
    lines = [head + (f"{'GFLOP':>9}{'GB':>8}{'ops':>7}" if costs else "")]
    reference = measured[base].summary()["p50"]
    for name, timed in measured.items():
        s = timed.summary()
        spent = f"{s['cpu_p50'] * 1e3:9.0f}" if "cpu_p50" in s else f"{'-':>9}"
        line = f"{name:<{width}}{s['p50'] * 1e3:9.0f}{s['p95'] * 1e3:9.0f}{s['min'] * 1e3:9.0f}{spent}{s['n']:5d}"
        line += f"{reference / s['p50']:7.2f}x"
        if costs:
            line += f"{costs[name].flops / 1e9:9.1f}{costs[name].bytes / 1e9:8.2f}{costs[name].ops:7d}"
        lines.append(line)
    return "\n".join(lines)


def profile(folder: Path, name: str, ours: Ours, peer: Peer) -> None:
    """Writes torch's table of one step of each side."""
    folder.mkdir(parents=True, exist_ok=True)
    peer.ask(f"profile {folder.resolve() / f'{name}-{peer.name}.txt'}")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        ours.run(1)
    rows = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
    (folder / f"{name}-ours.txt").write_text(rows)


def save(
    args: argparse.Namespace, name: str, case: Case, dtype: str, ours: Ours, warm: dict, measured: dict, extra: dict
) -> None:
    if args.output is None:
        return
    body = {
        **conditions(),
        "model": case.family.name,
        "case": case.name,
        "dtype": dtype,
        "batch": case.batch_size,
        "valid": dict(case.valid),
        "threads": args.threads,
        "warmup": args.warmup,
        "steps": args.steps,
        "rounds": args.rounds,
        "plan": plan_facts(ours.plan),
        "sides": {side: {**t.summary(), "seconds": t.seconds, "losses": t.losses} for side, t in measured.items()},
        "warm_losses": {side: t.losses for side, t in warm.items()},
        **extra,
    }
    print(f"record: {write_record(args.output, f'{name}-{case.name}-{dtype}', body)}")
