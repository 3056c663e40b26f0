"""Everything that only a GPU can show, in one call of under ten minutes: tests, kernels, and full-size training steps.

`bench/gpu.sh` runs it from a checkout, with nothing installed or fetched (torch, triton, numpy, safetensors, pyyaml and
pytest must be there; with pytest-xdist the tests run side by side). Each part is a process of its own with a limit of
its own, and writes its record as it goes: a part that is cut off, or whose device is lost, keeps what it has.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from vlaforge.bench.gpu_steps import LOST
from vlaforge.bench.record import record_path
from vlaforge.graphs.devices import detect

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
TESTS_S, KERNELS_S = 170.0, 110.0
"""Most seconds of the tests and of the kernel benchmark; the steps have the rest of the budget, about half of it."""
WORKERS = 8
"""Test processes: each has a CUDA context, and compiles kernels on a core."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pi05")
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything")
    parser.add_argument("--batch-size", type=int, default=16, help="of the variants that are compared")
    parser.add_argument("--parts", default="tests,kernels,steps", help="what to run, by name")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the records")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("forge-bench gpu: no CUDA device; the same code paths are tested on the CPU (make test).")
        return 2
    until = time.monotonic() + args.budget
    parts = args.parts.split(",")
    print(f"{torch.cuda.get_device_name(0)} · torch {torch.__version__} · {detect().label}", flush=True)
    codes: list[int] = []
    if "tests" in parts:
        codes.append(command("tests", tests_line(), min(TESTS_S, until - time.monotonic())))
    if "kernels" in parts:
        line = forge_bench("kernels", "--output", str(args.output), "--seconds", str(KERNELS_S - 20))
        codes.append(command("kernels", line, min(KERNELS_S, until - time.monotonic())))
    if "steps" in parts:
        codes.append(steps(args, until))
    return 1 if any(codes) else 0


def tests_line() -> list[str]:
    """Only the files that have such tests: others import what a GPU machine may lack."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    line = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files]
    if find_spec("xdist") is None:
        return line
    return [*line, "-n", str(min(WORKERS, os.cpu_count() or 1))]


def forge_bench(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "vlaforge.bench.cli", *words]


def steps(args: argparse.Namespace, until: float) -> int:
    """The table of training steps; a process that lost the device is followed by another, which goes on behind it."""
    record = record_path(args.output, f"gpu-{args.model}")
    code = LOST
    while code == LOST or code < 0:
        left = until - time.monotonic()
        if left < 20:
            print("[steps] the time is up")
            return 1
        line = forge_bench("gpu_steps", "--model", args.model, "--batch-size", str(args.batch_size))
        code = command("steps", [*line, "--record", str(record), "--seconds", str(left - 10)], left)
    return code


def command(name: str, line: list[str], seconds: float) -> int:
    """Runs a part as a process group of its own, with its output on ours; its exit code, 1 when the time was up."""
    began = time.monotonic()
    process = subprocess.Popen(line, start_new_session=True)
    try:
        code = process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the workers that it started
        process.wait()
        print(f"[{name}] stopped after {seconds:.0f} s", flush=True)
        return 1
    print(f"[{name}] exit {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code
