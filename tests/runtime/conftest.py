"""A small π0.5 on the bundled dataset, trained in this process in about a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vlaforge.runtime.config import resolve
from vlaforge.runtime.hooks import Hooks
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.trainer import Trainer

WORKER = Path(__file__).with_name("ranks_worker.py")
SMALL = [
    "--model", "pi05", "--preset", "tiny", "model.vision.depth=1", "model.language.depth=2", "model.expert.depth=2",
    "--per-device-batch-size", "2", "--num-workers", "0", "--eval-episodes", "none", "--lr-warmup-iters", "2",
    "--lr-decay-iters", "12", "--train-iters", "6",
]  # fmt: skip


class Record(Hooks):
    """Keeps what the trainer says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def logged(self, step: int, metrics: Any) -> None:
        self.rows.append(dict(metrics))


class Runs:
    """Runs the small model with further flags; every run has its own folder unless one is named."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        self.hooks = Record()

    def __call__(self, *flags: str, into: str | None = None, hooks: Hooks | None = None) -> Trainer:
        self.count += 1
        self.hooks = hooks or Record()
        target = self.folder / (into or f"run{self.count}")
        trainer = Trainer(build_setup(resolve([*SMALL, "--output-dir", str(target), *flags])), self.hooks)
        trainer.train()
        return trainer

    def rows(self, trainer: Trainer) -> list[dict[str, Any]]:
        """``metrics.jsonl`` of a run."""
        return [json.loads(line) for line in (trainer.folder / "metrics.jsonl").read_text().splitlines()]

    def losses(self, trainer: Trainer) -> list[tuple[int, float, float]]:
        return [(row["step"], row["loss"], row["grad_norm"]) for row in self.rows(trainer)]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="session")
def record() -> type[Record]:
    return Record


@pytest.fixture(scope="session")
def take() -> Callable[..., dict[str, Any]]:
    """``take(world, jobs, folder, *flags)`` runs `jobs` (name → flags of `forge-run`) in one job of `world` ranks, each
    in a folder of its own unless it names one; their losses, norms and memory by name."""

    def take(world: int, jobs: dict[str, list[str]], folder: Path, *flags: str) -> dict[str, Any]:
        listed = [
            {"name": name, "argv": ["--output-dir", str(folder / f"{world}-{name}"), *argv]}
            for name, argv in jobs.items()
        ]
        file = folder / f"jobs{world}.json"
        file.write_text(json.dumps(listed))
        command = [sys.executable]
        if world > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", "0"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(WORKER), str(file), *flags], env=env, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
        return json.loads(Path(f"{file}.out").read_text())

    return take
