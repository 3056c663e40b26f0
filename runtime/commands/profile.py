"""`forge-profile`: where a training step's time goes, what it costs on a named GPU, and whether it can be captured.

    forge-profile --model pi05 --preset tiny                     a page about three steps, on made-up data
    forge-profile --model pi05 --preset tiny --check             host syncs and what else breaks a CUDA graph
    forge-profile --model pi05 --cost --device-kind h200         FLOPs, bytes, memory and roofline, without weights

Everything else that `forge-run` takes is taken too. Exit codes: 0 done, 1 `--check` found something, 2 something given
cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from vlaforge.data.errors import UserError
from vlaforge.runtime.config import Resolved, resolve
from vlaforge.runtime.hooks import Hooks
from vlaforge.runtime.streams import tolerant


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge-profile",
        allow_abbrev=False,
        description="Profiles training steps; further flags are those of forge-run.",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps to profile (default 3)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument("--check", action="store_true", help="only watch one step for host syncs, and list them")
    parser.add_argument("--cost", action="store_true", help="only count a step's cost; builds no weights")
    parser.add_argument("--real-data", action="store_true", help="read the configured dataset instead of made-up data")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code."""
    tolerant()
    args, rest = parser().parse_known_args(argv)
    try:
        if args.steps < 1 or args.warmup < 1:
            raise UserError("--steps and --warmup must be at least 1.")
        if args.cost:
            return show_cost(resolve(rest))
        resolved = resolve([*rest, *_forced(args, rest)])
        return check(resolved) if args.check else profile(resolved)
    except UserError as error:
        print(f"forge-profile: {error}", file=sys.stderr)
        return 2


def _forced(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Flags that make a training run a profiling run."""
    last = args.warmup + args.steps
    flags = ["--train-iters", str(last), "--save-interval", "0", "--eval-interval", "0"]
    flags += ["--profile", f"{args.warmup + 1}:{last}"]
    if not args.real_data:
        flags += ["--dataset-format", "dummy_datasets"]
    if "--output-dir" not in rest:
        flags += ["--output-dir", "outputs/profile"]
    return flags


class Notes(Hooks):
    """Prints what the trainer says."""

    def note(self, text: str) -> None:
        print(text)


def profile(resolved: Resolved) -> int:
    """Trains through the window, and says where the page is and what stands in it."""
    from vlaforge.runtime.setup import build_setup
    from vlaforge.runtime.trainer import Trainer

    trainer = Trainer(build_setup(resolved), Notes())
    trainer.train()
    texts = sorted(trainer.profiler.folder.glob("*.txt"), key=lambda path: path.stat().st_mtime)
    print(texts[-1].read_text(encoding="utf-8"), end="")
    return 0


def check(resolved: Resolved) -> int:
    """Watches one whole step of the lowered model."""
    from vlaforge.graphs.check import check_step
    from vlaforge.runtime.assemble import assemble, build_model, build_plan
    from vlaforge.runtime.meter import StageTimer
    from vlaforge.runtime.params import build_groups_of
    from vlaforge.runtime.ranks import Ranks
    from vlaforge.runtime.setup import build_setup

    setup = build_setup(resolved)
    model = build_model(setup, None, print)
    groups = build_groups_of(setup.args, model)
    parts = assemble(setup, model, groups, build_plan(setup, model, groups), Ranks(), StageTimer(setup.device))
    batches = iter(parts.loader)
    minibatches = [next(batches) for _ in range(parts.micro_batches)]
    report = check_step(parts.core, minibatches)
    print(parts.plan.text())
    print(report.text())
    return 0 if report.ok else 1


def show_cost(resolved: Resolved) -> int:
    """Counts of a step under the plan, its memory and roofline, and what each pass takes off."""
    from vlaforge.graphs.cost import pass_shares, step_cost
    from vlaforge.runtime.preflight import plan_options
    from vlaforge.runtime.setup import pick_device

    with torch.device("meta"):
        model = resolved.family.model(resolved.model_config)
    contract = resolved.family.model.contract(resolved.model_config)
    options = plan_options(resolved.args, pick_device(resolved.args.device))
    cost, plan = step_cost(model, contract, options)
    print(plan.text())
    print(f"\none micro-batch, forward and backward, nothing trimmed\n{cost.text()}")
    if options.device_kind.cuda:
        print(f"roofline of {options.device_kind.label}: {cost.seconds() * 1e3:.1f} ms a micro-batch")
    print(f"\nmemory of one device\n{cost.memory.text()}")
    print(f"\n{'without it':<16}{'FLOPs':>10}{'bytes':>10}{'launches':>10}{'time':>10}   more, as part of that")
    for share in pass_shares(model, contract, options):
        print(share.text())
    return 0
