"""`forge-run`: from a command line to a trained model, or to one sentence why not.

    forge-run --model pi05 --preset tiny --compile --train-iters 200 data.cameras.base_0_rgb=scene

Exit codes: 0 done, 1 the run failed, 2 something given cannot be used, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.config import Resolved, resolve_given, setting_lines
from vlaforge.runtime.console import Console
from vlaforge.runtime.flags import Given, help_text, parse
from vlaforge.runtime.streams import tolerant, unwritable

if TYPE_CHECKING:
    from vlaforge.runtime.ranks import Ranks
    from vlaforge.runtime.setup import Setup

KEPT = (
    "checkpoints", "metrics.jsonl", "log.txt", "config.yaml", "plan.txt", "plan.json", "openloop.json", "openloop.npz",
    "report.html",
)  # fmt: skip
"""What a former run left in its output folder, and a new one must not be mixed with; pictures (*.png) too."""

INTRO = """usage: forge-run --model FAMILY [--preset NAME] [flags] [model.x=...] [data.x=...]

Trains a model. Flags and settings may be mixed in any order; a setting belongs to the model's or the data's
configuration (forge-run --model FAMILY --help lists them). Later wins: dataclass defaults < preset < recipe <
--config-file < command line.
"""
OUTRO = """A run writes checkpoints, metrics.jsonl, log.txt, config.yaml (give it back with --config-file), plan.txt,
plan.json and report.html to --output-dir.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code."""
    tolerant()
    try:
        given = sys.argv[1:] if argv is None else argv
        return run(parse(TrainingArgs, given), given)
    except UserError as error:
        print(f"forge-run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if (sentence := unwritable(error)) is None:
            raise
        print(f"forge-run: {sentence}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `forge-run ... --plan | head`: who reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(given: Given, argv: Sequence[str] = ()) -> int:
    if given.help:
        print(help_text(TrainingArgs, INTRO, OUTRO + _settings_help(given)), end="")
        return 0
    resolved = resolve_given(of_run(given))
    if resolved.args.print_config:
        print(resolved.to_yaml(), end="")
        return 0
    console = Console()
    if resolved.args.export is not None:
        from vlaforge.runtime.export import export

        export(resolved, console.say)
        return 0
    if resolved.args.plan:
        return show_plan(resolved, console)
    if resolved.args.dry_run:
        return dry_run(resolved, console)
    from vlaforge.runtime import dist, launch

    if resolved.args.nproc > 1 and not dist.launched():
        return launch.launch(resolved.args, launch.without_launch(argv))
    return train_as_rank(resolved) if dist.launched() else train(resolved, console)


def of_run(given: Given) -> Given:
    """With ``--export`` alone, the configuration is the run's own: the one in its ``--output-dir``."""
    saved = Path(given.flags.get("output_dir") or TrainingArgs().output_dir) / "config.yaml"
    if given.flags.get("export") and not given.flags.get("config_file") and saved.is_file():
        given.flags["config_file"] = str(saved)
        given.spelled["config_file"] = "the run's config.yaml"
    return given


def train_as_rank(resolved: Resolved) -> int:
    """This process's part of a job of several ranks. A restarted job resumes by itself."""
    from vlaforge.runtime import dist
    from vlaforge.runtime.checkpoint.store import Checkpoints
    from vlaforge.runtime.launch import FOLLOWED
    from vlaforge.runtime.setup import pick_device

    args = resolved.args
    device = dist.own_device(pick_device(args.device))
    if dist.restarts() and Checkpoints(Path(args.output_dir) / "checkpoints").newest() is not None:
        args = replace(args, resume=True)
    resolved = replace(resolved, args=args)
    with dist.ProcessRanks(args, device) as ranks:
        try:
            code = train(resolved, Console(quiet=not ranks.leads), ranks)
        except UserError:
            ranks.failed_first()
            raise
        except Exception:
            first = ranks.failed_first()
            traceback.print_exc()
            print(f"forge-run: rank {ranks.rank} stopped. {ranks.absent()}", file=sys.stderr, flush=True)
            # Ending in the ordinary way would wait for collectives that never complete.
            dist.end(1 if first else FOLLOWED)
    dist.end(code)
    return code


def _settings_help(given: Given) -> str:
    """The model's and data settings with their values, when a model is named beside ``--help``."""
    if "model" not in given.flags:
        return ""
    lines = setting_lines(resolve_given(given))
    return f"\nSettings of {given.flags['model']} and their values here:\n" + "\n".join(f"  {line}" for line in lines)


def show_plan(resolved: Resolved, console: Console) -> int:
    """``--plan``: what would be changed in the model, and why; needs neither data nor weights."""
    import torch

    from vlaforge.graphs import make_plan
    from vlaforge.runtime.preflight import plan_options
    from vlaforge.runtime.setup import pick_device

    options = plan_options(resolved.args, pick_device(resolved.args.device))
    with torch.device("meta"):
        model = resolved.family.model(resolved.model_config)
    contract = resolved.family.model.contract(resolved.model_config)
    console.say(make_plan(model, contract, options).text())
    if resolved.args.world is not None:
        from vlaforge.graphs.scale import table, workload

        if not options.device_kind.cuda:
            raise UserError("--world compares strategies on GPUs: name one with --device-kind, such as h200.")
        console.say()
        console.say(table(workload(model, contract, options), resolved.args.world, options.device_kind))
    return 0


def dry_run(resolved: Resolved, console: Console) -> int:
    """``--dry-run``: every check, then the memory that a step will need."""
    from vlaforge.runtime.memory import memory_report
    from vlaforge.runtime.preflight import on_paper, preflight

    for note in resolved.notes:
        console.say(f"note  {note}")
    setup = preflight(resolved, lambda name, what: console.say(f"ok    {name:<18} {what}"))
    for note in setup.notes:
        console.say(f"note  {note}")
    console.say()
    console.say(memory_report(setup, *on_paper(setup)))
    console.say()
    console.say("All checks passed; nothing was trained (--dry-run).")
    return 0


def train(resolved: Resolved, console: Console, ranks: Ranks | None = None) -> int:
    """Checks, trains and reports."""
    began = time.perf_counter()
    from vlaforge.runtime.preflight import preflight
    from vlaforge.runtime.process import locked
    from vlaforge.runtime.ranks import Ranks

    checks: list[tuple[str, str]] = []
    setup = preflight(resolved, lambda name, what: checks.append((name, what)))
    ranks = ranks or Ranks()
    folder = Path(resolved.args.output_dir)
    # Before anything of a former run is moved: it may be running still.
    with locked(folder) if ranks.leads else nullcontext():
        return _train(resolved, setup, checks, console, ranks, began)


def _train(
    resolved: Resolved, setup: Setup, checks: list[tuple[str, str]], console: Console, ranks: Ranks, began: float
) -> int:
    """The run after its checks, in a folder that is its own."""
    from vlaforge.data import norm_table
    from vlaforge.runtime.launch import gpus_unused

    folder = Path(resolved.args.output_dir)
    moved = None
    if ranks.leads:
        moved = None if resolved.args.resume else set_aside(folder)
        console.log = folder / "log.txt"
        resolved.save(folder / "config.yaml")
    if moved is not None:
        console.say(f"note  a former run was in this folder: it is now in {moved}")
    for name, what in checks:
        console.say(f"{name:<16} {what}")
    if setup.norm_rows:
        console.say(norm_table.text(setup.norm_rows))
    notes = [*resolved.notes, *setup.notes]
    if ranks.world == 1 and (idle := gpus_unused(resolved.args)) is not None:
        notes.append(idle)
    for note in notes:
        console.say(f"note  {note}")
    from vlaforge.runtime.session import Session
    from vlaforge.runtime.trainer import Trainer

    if resolved.args.verify_compile:
        from vlaforge.runtime.verify import verify

        console.say(verify(setup, ranks))
    if not ranks.leads:
        Trainer(setup, None, ranks).train()
        return 0
    with Session(setup, console, began) as session:
        Trainer(setup, session, ranks, held=True).train()
    return 0


def set_aside(folder: Path) -> Path | None:
    """Moves what a former run left into a subfolder, so that nothing is lost or mixed; returns the subfolder."""
    left = [folder / name for name in KEPT if (folder / name).exists()] + sorted(folder.glob("*.png"))
    if not left:
        return None
    target = folder / f"former-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 2
    while target.exists():
        target = target.with_name(f"{target.name.split('+')[0]}+{number}")
        number += 1
    target.mkdir()
    for path in left:
        path.rename(target / path.name)
    return target
