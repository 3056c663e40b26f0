"""Kills a training run while it saves, again and again, and continues it; run by test_crash.py, or by hand:

    python tests/runtime/crash.py 30            30 kills over all formats, in the foreground and the background

Children are forked from one process that has imported everything, so that a kill costs about two seconds. Each child
saves after every step; it is killed at a random moment after its first checkpoint. Whatever is left must continue, and
the losses of all steps together must be those of a run that nobody killed, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # no threads before the forks

FLAGS = [
    "--model", "pi05", "--preset", "tiny", "--dataset-format", "dummy_datasets", "model.vision.depth=1",
    "model.language.depth=1", "model.expert.depth=1", "model.image_size=16", "--per-device-batch-size", "2",
    "--num-workers", "0", "--eval-episodes", "none", "--lr-warmup-iters", "2", "--save-interval", "1",
    "--save-total-limit", "3", "--ema-decay", "0.9",
]  # fmt: skip


def train(folder: Path, *flags: str) -> None:
    """One run in this process, without a word."""
    import torch

    from vlaforge.runtime.config import resolve
    from vlaforge.runtime.setup import build_setup
    from vlaforge.runtime.trainer import Trainer

    torch.set_num_threads(1)
    Trainer(build_setup(resolve([*FLAGS, "--output-dir", str(folder), *flags]))).train()


def forked(folder: Path, *flags: str) -> int:
    """`train` in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        train(folder, *flags)
        os._exit(0)
    except BaseException as error:
        print(f"child failed: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def kill_once(folder: Path, random_: random.Random, *flags: str) -> bool:
    """Starts or continues the run and kills it; False when it had finished before."""
    held = (folder / "checkpoints" / "last").exists()
    child = forked(folder, *flags, *(["--resume"] if held else []))
    while not any((folder / "checkpoints").glob("steps_*")):
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended and not any((folder / "checkpoints").glob("steps_*")):
            raise SystemExit("a run ended before its first checkpoint")
        time.sleep(0.002)
    time.sleep(random_.uniform(0.0, 0.6) + (0.4 if held else 0.0))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


def difference(found: dict[int, tuple[float, float]], wanted: dict[int, tuple[float, float]]) -> str | None:
    """Where two runs first differ, or None."""
    for step in sorted(found.keys() | wanted.keys()):
        if found.get(step) != wanted.get(step):
            return f"DIFFERENT in step {step}: (loss, norm) {found.get(step)} instead of {wanted.get(step)}"
    return None


def main(kills: int) -> int:
    """Prints a line a format; returns 1 when any run differs from the uninterrupted one."""
    from vlaforge.runtime import trainer  # noqa: F401 (imported once, before the forks)

    random_ = random.Random(0)
    base = Path(tempfile.mkdtemp(prefix="vlaforge-crash-"))
    steps = 12 + 12 * -(-kills // 6)  # long enough that the last kill still finds the run at work
    kinds = [(format, mode) for format in ("safetensors", "pt", "dcp") for mode in ("async-save", "no-async-save")]
    done = dict.fromkeys(kinds, 0)
    wrong = 0
    try:
        if os.waitpid(forked(base / "whole", "--train-iters", str(steps)), 0)[1]:
            raise SystemExit("the uninterrupted run failed")
        wanted = losses(base / "whole")
        assert len(wanted) == steps
        for kind in cycle(kinds):
            if sum(done.values()) >= kills:
                break
            folder, flags = (
                base / "-".join(kind),
                ["--save-format", kind[0], f"--{kind[1]}", "--train-iters", str(steps)],
            )
            done[kind] += 1
            kill_once(folder, random_, *flags)
            if sum(done.values()) + len(kinds) > kills:  # the last of its kind: let it run to its end
                if os.waitpid(forked(folder, *flags, "--resume"), 0)[1]:
                    raise SystemExit(f"{kind}: the run could not be continued")
                apart = difference(losses(folder), wanted)
                wrong += apart is not None
                print(f"{kind[0]:<12} {kind[1]:<14} {done[kind]} kills: {apart or 'equal'}", flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
