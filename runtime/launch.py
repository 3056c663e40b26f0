"""Starting ranks: ``forge-run --nproc 8 …`` is torchrun on this machine; it says which rank failed, and its last words.

Several machines and Slurm use torchrun itself: ``torchrun … --no-python forge-run …`` (docs/distributed.md).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs

LAST_LINES = 15
FOLLOWED = os.EX_TEMPFAIL
"""Exit code of a rank that failed after another had: most often it only lost its peer."""
SAME_POLL_S = 1
"""Failures this far apart (torchelastic stamps whole seconds) were found in one look at the ranks; what ends later was
ended by the launcher, first with SIGTERM, half a minute later with SIGKILL."""


def gpus_unused(args: TrainingArgs) -> str | None:
    """A sentence on how to use all GPUs, when a single process would leave some idle."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2 or args.device == "cpu":
        return None
    return f"This machine has {count} GPUs and one is used: --nproc {count} uses all."


def world_size() -> int:
    """Ranks of the job that this process is one of, 1 outside of a job; what started it says so in WORLD_SIZE."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"The environment variable WORLD_SIZE is '{text}': it must be the number of ranks.")
    return int(text)


def check_processes(flag: str, count: int) -> None:
    """UserError for more processes than a machine stands: a slip of the finger would take it down."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if count > most:
        raise UserError(f"{flag} is {count}, more processes than this machine should run; at most {most}.")


def launch(args: TrainingArgs, argv: Sequence[str]) -> int:
    """Starts ``forge-run argv`` (without --nproc) as `args.nproc` ranks; returns the exit code of the job.

    Raises UserError when more ranks than GPUs are asked for.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device != "cpu" and 0 < count < args.nproc:
        raise UserError(f"--nproc is {args.nproc}, but this machine has {count} GPUs.")
    check_processes("--nproc", args.nproc)
    logs = Path(tempfile.mkdtemp(prefix="forge-ranks-"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=args.nproc,
        max_restarts=args.max_restarts,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        monitor_interval=0.2,
        # Rank 0 has the terminal; what the others say is kept until the job has ended.
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, args.nproc), Std.ALL)),
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.nproc)))
    command = [sys.executable, "-m", "vlaforge.runtime.commands.start", *argv]
    try:
        elastic_launch(config, command[0])(*command[1:])
        return 0
    except SignalException as error:
        print(f"forge-run: the job was ended by {error.sigval.name}; its ranks saved what they could.", file=sys.stderr)
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        rank, failure = cause(error.failures)
        print(failure_text(rank, failure.exitcode, _last_words(logs, rank)), file=sys.stderr)
        return failure.exitcode if 0 < failure.exitcode < 128 and failure.exitcode != FOLLOWED else 1
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def cause(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """The rank that took the job down, with its torchelastic ``ProcessFailure``, of all by rank.

    By time alone it cannot be told: the others lose their peer within milliseconds. A rank that a signal ended did not
    do so in consequence of another; then come those that failed by themselves, then those that followed them.
    """
    first = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, Any]) -> tuple[int, int, int]:
        rank, failure = item
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        kind = 0 if killed else 1 if failure.exitcode != FOLLOWED else 2
        ended_here = failure.timestamp > first + SAME_POLL_S or failure.exitcode == -signal.SIGTERM
        return (3 if ended_here else kind), failure.timestamp, rank

    return min(failures.items(), key=order)


def failure_text(rank: int, code: int, words: Sequence[str]) -> str:
    """What a person needs to know of a failed rank."""
    how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
    lines = [f"forge-run: rank {rank} {how}; all other ranks were ended."]
    if words:
        lines += [f"Its last lines:\n{'-' * 60}", *words, "-" * 60]
    return "\n".join(lines)


def _last_words(logs: Path, rank: int) -> list[str]:
    """The last lines that the rank wrote, of its last attempt."""
    found = sorted(logs.glob(f"**/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    words = [line for path in found[-1:] for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if not words:
        found = sorted(logs.glob(f"**/{rank}/stdout.log"), key=lambda path: path.stat().st_mtime)
        words = [line for path in found[-1:] for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return words[-LAST_LINES:]


def without_launch(argv: Sequence[str]) -> list[str]:
    """The command line for one rank: --nproc and --max-restarts are the launcher's."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in ("--nproc", "--max-restarts"):
            skip = True
        elif not word.startswith(("--nproc=", "--max-restarts=")):
            kept.append(word)
    return kept
