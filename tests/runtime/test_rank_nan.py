"""A NaN on one rank of two: both refuse that step and no other, both go on, and it is counted once."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

FLAGS = [
    "--model", "pi05", "--preset", "tiny", "--device", "cpu", "--num-workers", "0", "--eval-episodes", "none",
    "model.vision.depth=1", "model.language.depth=1", "model.expert.depth=1", "--per-device-batch-size", "2",
    "--train-iters", "9", "--save-interval", "0", "--lr-warmup-iters", "0", "--fsdp-min-num-params", "0",
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_both_ranks_skip_the_same_step(tmp_path, strategy):
    worker, file = Path(__file__).with_name("nan_worker.py"), tmp_path / "out.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", str(worker), str(file), *FLAGS, "--distributed-strategy", strategy,
        "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(file.read_text())
    assert [row["skipped"] for row in found["rows"]] == [0] * 6 + [1] * 3
    assert [row["in_a_row"] for row in found["rows"]] == [0] * 6 + [1, 0, 0]
    assert found["states"][0] == found["states"][1] and found["states"][0]["nonfinite"] == 1
    for rank in found["sums"]:
        moved = [before != after for before, after in pairwise(rank)]
        assert moved == [True] * 5 + [False] + [True] * 2  # weights after steps 6 and 7 are the same, on both ranks
