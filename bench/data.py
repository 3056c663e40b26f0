"""samples/s and CPU time of the data loader, beside LeRobot's own on the same dataset.

Both sides run in turn, several times in one call, each in a fresh process, with the same torch DataLoader settings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlaforge.bench.record import conditions, write_record
from vlaforge.data.errors import UserError
from vlaforge.data.statistics import cache_folder

FEED = Path(__file__).parent / "peers" / "feed.py"
SAMPLES = Path(__file__).parent.parent / "data" / "samples" / "metaworld_v30"


@dataclass(frozen=True)
class Run:
    """One timed run of one side; `load_1m` is the machine's load average behind it, this run's own share included."""

    side: str
    workers: int
    samples_per_s: float
    cpu_ms_per_sample: float
    load_1m: float
    versions: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-path", default=str(SAMPLES), help="a LeRobot v3.0 folder (default: the bundled one)")
    parser.add_argument("--peer-python", default=os.environ.get("VLAFORGE_PEER_PYTHON"),
                        help="interpreter with LeRobot installed (default: $VLAFORGE_PEER_PYTHON)")  # fmt: skip
    parser.add_argument("--no-peer", action="store_true", help="measure only this project")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of loader workers")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=50, help="actions a sample")
    parser.add_argument("--prefetch", type=int, default=2, help="batches each worker keeps ready")
    parser.add_argument("--video-backend", default=None, help="the same decoder for both (default: each side's own)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each timed run, after the warm-up")
    parser.add_argument("--warmup", type=int, default=8, help="batches before the clock starts")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, in turn")
    parser.add_argument("--at-least", type=float, default=None, help="exit 1 when the median speed-up is lower")
    parser.add_argument("--output", type=Path, default=None, help="folder for the JSON record")


def run(args: argparse.Namespace) -> int:
    python = _peer(args)
    sides = {"ours": sys.executable, **({"lerobot": python} if python else {})}
    runs: list[Run] = []
    for workers in args.workers:
        for repeat in range(args.repeats):
            # the side that goes first changes, so that neither always meets the warmer machine
            for side in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
                runs.append(_run(side, sides[side], workers, args))
                made = runs[-1]
                print(f"{side:8} {workers} workers  {made.samples_per_s:8.1f} samples/s  "
                      f"{made.cpu_ms_per_sample:7.2f} ms CPU/sample  load {made.load_1m:5.1f}", flush=True)  # fmt: skip
    ratios = [_summary(runs, workers, bool(python)) for workers in args.workers]
    if args.output:
        body = {"runs": [asdict(r) for r in runs], "speedup": dict(zip(map(str, args.workers), ratios))}
        own = ("peer_python", "output", "at_least", "dataset_path", "run", "command")  # of this machine or call
        settings = {k: v for k, v in vars(args).items() if k not in own} | {"dataset": Path(args.dataset_path).name}
        print(f"record: {write_record(args.output, 'data', {**conditions(), 'settings': settings, **body})}")
    slow = args.at_least is not None and any(ratio is not None and ratio < args.at_least for ratio in ratios)
    return 1 if slow else 0


def _peer(args: argparse.Namespace) -> str | None:
    if args.no_peer:
        return None
    if not args.peer_python:
        raise UserError(
            "There is nothing to compare with: give --peer-python an interpreter with LeRobot installed "
            "(python3.12 -m venv peer && peer/bin/pip install lerobot), or --no-peer to measure this project alone."
        )
    try:
        asked = subprocess.run([args.peer_python, "-c", "import lerobot"], capture_output=True, text=True)
        last = (asked.stderr.strip().splitlines() or ["?"])[-1] if asked.returncode else ""
    except OSError as error:
        last = str(error)
    if last:
        raise UserError(f"'{args.peer_python}' cannot import LeRobot ({last}); name another one with --peer-python.")
    return args.peer_python


def _run(side: str, python: str, workers: int, args: argparse.Namespace) -> Run:
    job: dict[str, Any] = {
        "side": side,
        "path": str(Path(args.dataset_path).resolve()),
        "workers": workers,
        "batch": args.batch_size,
        "chunk": args.chunk,
        "prefetch": args.prefetch,
        "backend": args.video_backend,
        "seconds": args.seconds,
        "warmup": args.warmup,
    }
    home = cache_folder() / "bench" / "huggingface"  # the peer copies the table there, never into the dataset
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    began = time.monotonic()
    done = subprocess.run(
        [python, str(FEED), json.dumps(job)], capture_output=True, text=True, env=environment, timeout=600
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("FEED ")), None)
    if line is None:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise UserError(f"The side '{side}' ended after {time.monotonic() - began:.0f} s without a result:\n{tail}")
    got = json.loads(line.removeprefix("FEED "))
    rate = got["samples"] / got["wall_s"]
    cpu = 1000 * got["cpu_s"] / got["samples"]
    return Run(side, workers, rate, cpu, round(os.getloadavg()[0], 2), got["versions"])


def _summary(runs: list[Run], workers: int, with_peer: bool) -> float | None:
    def median(side: str, name: str) -> float:
        return statistics.median(getattr(r, name) for r in runs if r.side == side and r.workers == workers)

    line = f"\n{workers} workers: {median('ours', 'samples_per_s'):.1f} samples/s"
    if not with_peer:
        print(line)
        return None
    ratio = median("ours", "samples_per_s") / median("lerobot", "samples_per_s")
    cpu = median("lerobot", "cpu_ms_per_sample") / median("ours", "cpu_ms_per_sample")
    versions = {side: next(r.versions for r in runs if r.side == side) for side in ("ours", "lerobot")}
    print(
        f"{line} against {median('lerobot', 'samples_per_s'):.1f} of LeRobot {versions['lerobot']['lerobot']}: "
        f"{ratio:.2f} times as fast, at {1 / cpu:.0%} of its CPU time a sample "
        f"(median of {sum(r.side == 'ours' and r.workers == workers for r in runs)} runs each; decoders "
        f"{versions['ours']['decoder']} and {versions['lerobot']['decoder']})"
    )
    return ratio
