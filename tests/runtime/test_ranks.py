"""Several ranks (gloo, real processes): every strategy gives the single process's numbers, and shares memory."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from vlaforge import models

SIZES = {
    "vision": {"width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 32, "patch_size": 16},
    "language": {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
    "expert": {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
}
SMALL = [f"model.{tower}.{name}={value}" for tower, sizes in SIZES.items() for name, value in sizes.items()]
SMALL += ["model.image_size=32", "data.image_size=32"]
TINY = [
    "--preset", "tiny", "--device", "cpu", "--num-workers", "0", "--train-iters", "5", "--save-interval", "0",
    "--lr-warmup-iters", "0", "--lr-base", "0.001", "--fsdp-min-num-params", "0",
    "--fsdp-leftover-min-num-params", "10000",
]  # fmt: skip
BASE = ["--model", "pi05", *TINY, *SMALL]
STRATEGIES = {
    "ddp": ["--distributed-strategy", "ddp"],
    "zero1": ["--distributed-strategy", "ddp", "--zero-optimizer"],
    "fsdp": ["--distributed-strategy", "fsdp"],
    "hsdp": ["--distributed-strategy", "fsdp", "--hsdp-shard-size", "2"],
}
COMPILE = {"eager": [], "compile": ["--compile", "--with", "static_shapes"]}
TRAIN = {
    "full": [],
    "lora": ["--use-lora", "--lora-r", "4", "--lora-target-modules", "q_proj,v_proj"],
    "frozen": ["--freeze-modules", "vision"],
}
TOTAL = 8


def runs(world: int) -> dict[str, list[str]]:
    """Name → flags of every run of the matrix on `world` ranks."""
    strategies = {"single": []} if world == 1 else {k: v for k, v in STRATEGIES.items() if k != "hsdp" or world == 4}
    return {
        f"{strategy}-{how}-{what}": [
            *BASE, "--per-device-batch-size", str(TOTAL // world), *strategies[strategy], *COMPILE[how], *TRAIN[what],
        ]
        for strategy, how, what in product(strategies, COMPILE, TRAIN)
    }


@pytest.fixture(scope="module")
def alone(take, tmp_path_factory):
    """The single process's numbers, which every strategy must give."""
    return take(1, runs(1), tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("world", [2, 4])
def test_same_numbers(world, alone, take, tmp_path):
    """Losses and gradient norms of 5 steps: each strategy, eager and compiled, full, LoRA and with a frozen tower."""
    together = take(world, runs(world), tmp_path)
    assert len(together) == 6 * (4 if world == 4 else 3)
    for name, result in together.items():
        expected = alone["single-" + name.partition("-")[2]]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5), name
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name


def test_every_family_sharded_gives_the_numbers_of_one_process(take, tmp_path):
    """FSDP on 2 ranks, and adapters: losses and gradient norms of 3 steps, for every family but the matrix's own. In
    bf16, with what stays fp32 in units of its own, the loss to that precision."""
    names = [name for name in models.available() if name != "pi05"]
    run = [*TINY, "--train-iters", "3", "--eval-episodes", "none"]
    what = {"full": [], "lora": TRAIN["lora"][:3], "bf16": ["--dtype", "bfloat16", "--train-iters", "1"]}
    results = []
    for world in (1, 2):
        strategy = STRATEGIES["fsdp"] if world > 1 else []
        jobs = {
            f"{name}-{kind}": [
                "--model", name, *run, *flags, *strategy, "--per-device-batch-size", str(4 // world)
            ]
            for name, (kind, flags) in product(names, what.items())
        }
        results.append(take(world, jobs, tmp_path))
    alone, together = results
    assert len(together) == 3 * len(names) and together.keys() == alone.keys()
    for name, result in together.items():
        low = name.endswith("bf16")
        assert result["loss"] == pytest.approx(alone[name]["loss"], rel=4e-3 if low else 1e-5), name
        assert result["grad_norm"] == pytest.approx(alone[name]["grad_norm"], rel=2e-2 if low else 1e-5), name


def rows(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def forge_run(folder: Path, world: int, *flags: str) -> list[tuple[int, float]]:
    """`forge-run` as a person calls it, with a global batch of `TOTAL`; the run's (step, loss) so far."""
    argv = [*BASE, "--eval-episodes", "none", "--output-dir", str(folder)]
    argv += ["--per-device-batch-size", str(TOTAL // world)]
    argv += ["--nproc", str(world)] if world > 1 else []
    done = subprocess.run(
        [sys.executable, "-m", "vlaforge.runtime.commands.start", *argv, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return rows(folder)


def test_a_run_goes_on_with_other_ranks(tmp_path):
    """2 ranks of DDP, then 4 of FSDP, then one process: the losses of an uninterrupted run, every step once; and its
    weights are read shard by shard as a start."""
    run = ["--lr-decay-iters", "6", "--save-interval", "2"]
    whole = forge_run(tmp_path / "whole", 1, *run, "--train-iters", "6")
    parted = tmp_path / "parted"
    forge_run(parted, 2, *run, "--train-iters", "2", *STRATEGIES["ddp"])
    forge_run(parted, 4, *run, "--train-iters", "4", "--resume", *STRATEGIES["fsdp"])
    together = forge_run(parted, 1, *run, "--train-iters", "6", "--resume")
    assert [step for step, _ in together] == list(range(1, 7))
    assert [loss for _, loss in together] == pytest.approx([loss for _, loss in whole], rel=1e-5)
    last = str(parted / "checkpoints" / "steps_6")
    start = ["--train-iters", "2", "--save-interval", "0", "--pretrained-checkpoint", last]
    sharded = forge_run(tmp_path / "meta", 2, *start, "--init-on-meta", *STRATEGIES["fsdp"])
    plain = forge_run(tmp_path / "plain", 1, *start)
    assert [loss for _, loss in sharded] == pytest.approx([loss for _, loss in plain], rel=1e-5)


def test_traffic_is_the_least(take, tmp_path):
    """Bytes in collectives of one step against the least that each strategy can do with: DDP all-reduces its gradients
    once; ZeRO-1 gathers the weights and scatters the gradients once; FSDP gathers what is in units once more. Beside
    them a step sends a few numbers. (docs/distributed.md has the table.)"""
    flags = [*BASE, "--per-device-batch-size", "4", "--train-iters", "2", "--eval-episodes", "none"]
    jobs = {name: [*flags, *STRATEGIES[name]] for name in ("ddp", "zero1", "fsdp")}
    jobs["ddp"] += ["--ddp-comm-hook", "allreduce_hook"]
    results = {name: result["ranks"][0] for name, result in take(2, jobs, tmp_path, "--count-traffic").items()}
    weights = results["ddp"]["weights"]
    gradients = results["ddp"]["optimizer"] // 2
    for result in results.values():
        assert result["traffic"].pop("scalars") < 1024 * result["calls"].pop("scalars") <= 1024 * 8
    assert results["ddp"]["traffic"] == {"reduced": gradients}
    assert results["zero1"]["traffic"] == {"gathered": weights, "scattered": gradients}
    assert results["zero1"]["calls"]["gathered"] == results["zero1"]["calls"]["scattered"]
    sent = results["fsdp"]["traffic"]
    assert sent["scattered"] == gradients and weights < sent["gathered"] <= 2 * weights


def test_memory_is_shared(take, tmp_path):
    """ZeRO-1 and FSDP hold about 1/N of the optimiser, FSDP of the weights, too; DDP holds all of it."""
    jobs = {name: [*BASE, "--per-device-batch-size", "2", *STRATEGIES[name]] for name in ("ddp", "zero1", "fsdp")}
    jobs = {name: [*argv, "model.vocab_size=1024", "model.language.mlp_dim=256"] for name, argv in jobs.items()}
    held = {name: result["ranks"] for name, result in take(4, jobs, tmp_path).items()}
    whole = held["ddp"][0]
    for name in ("zero1", "fsdp"):
        for kind in ("optimizer", "weights"):
            shares = [rank[kind] / whole[kind] for rank in held[name]]
            assert max(shares) < 0.32 and sum(shares) < 1.15, (name, kind, shares)
