"""A run as a person lives through it: progress while it goes, the open-loop check around it, the report at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vlaforge.data.schema import ACTION
from vlaforge.graphs import Plan
from vlaforge.runtime.console import Console, Progress, duration
from vlaforge.runtime.hooks import Hooks
from vlaforge.runtime.openloop import OpenLoop, Prediction, save_json, summary
from vlaforge.runtime.setup import Setup


class Session(Hooks):
    """Shows, evaluates and reports one run; use it in a ``with``.

    Args:
        setup: what the run is made of.
        console: where it is shown.
        began: `time.perf_counter()` at the start of the command.
    """

    def __init__(self, setup: Setup, console: Console, began: float):
        self.setup, self.console, self.began = setup, console, began
        self.folder = Path(setup.args.output_dir)
        self.check = None if setup.held_out is None else open_loop(setup)
        self.before: Prediction | None = None
        self.plan = ""
        self._progress: Progress | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_progress()

    def _stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.__exit__()
            self._progress = None

    # --------------------------------------------------------------------------------------------- hooks

    def started(self, trainer: Any) -> None:
        if self.check is None:
            return
        path = self.folder / "openloop.npz"
        if trainer.completed and path.exists():
            self.before = load_prediction(path)
        elif not trainer.completed:
            self.before = self.check.predict(trainer.model, trainer.device)
            save_prediction(self.before, path)
            error, yardstick = self.before.errors().mean(), self.check.baseline(self.before).mean()
            self.console.say(
                f"open loop before training: mean absolute error {error:.4f} "
                f"(repeating the mean action: {yardstick:.4f})"
            )

    def planned(self, plan: Plan) -> None:
        super().planned(plan)
        (self.folder / "plan.txt").write_text(plan.text() + "\n", encoding="utf-8")
        save_json(plan.json(), self.folder / "plan.json")

    def note(self, text: str) -> None:
        if text.startswith("forge plan"):
            self.plan = text
        self.console.say(text)

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._progress is None:
            self._progress = self.console.progress(self.setup.args.train_iters, step - 1)
            self._progress.__enter__()
            self.console.say(f"first step after {duration(time.perf_counter() - self.began)}")
        self._progress.update(step, metrics)

    def evaluate(self, trainer: Any, step: int) -> Mapping[str, float]:
        if self.check is None:
            return {}
        error = float(self.check.predict(trainer.model, trainer.device).errors().mean())
        self.console.say(f"step {step}: open-loop error {error:.4f}")
        return {"eval_error": error}

    def finished(self, trainer: Any) -> None:
        self._stop_progress()
        from vlaforge.runtime import report

        result = None
        if self.check is not None:
            after = self.check.predict(trainer.model, trainer.device)
            names = action_names(self.setup)
            result = summary(self.check, names, self.before, after, self._conditions(trainer))
            save_json(result, self.folder / "openloop.json")
            report.openloop_picture(self.before, after, names, result, self.folder / "openloop.png")
        rows = report.read_metrics(self.folder / "metrics.jsonl")
        seconds = time.perf_counter() - self.began
        title = f"{self.setup.resolved.family.name} · {self.folder}"
        texts = {"Plan": self.plan, "Configuration": self.setup.resolved.to_yaml()}
        self.console.say()
        self.console.say(report.finish(self.folder, title, rows, result, report.run_facts(rows, seconds), texts))
        if trainer.checkpoint:
            self.console.say(f"{'checkpoint':<18} {trainer.checkpoint}")
        self.console.say(f"Done in {duration(seconds)}.")

    def _conditions(self, trainer: Any) -> dict[str, Any]:
        args = self.setup.args
        return {
            "model": self.setup.resolved.family.name,
            "preset": args.preset,
            "steps": args.train_iters,
            "batch": args.per_device_batch_size * args.gradient_accumulation_steps,
            "denoising_steps": self.check.steps,
            "seed": args.seed,
            "dataset": str(self.setup.dataset.info.path),
            "checkpoint": str(trainer.checkpoint) if trainer.checkpoint else None,
        }


def open_loop(setup: Setup) -> OpenLoop:
    """The check on the held-out episodes, against the mean action of the training episodes."""
    mean_A = np.concatenate([setup.dataset.column(ACTION, e) for e in setup.dataset.episodes]).mean(0)
    return OpenLoop(
        setup.held_out,
        setup.processing,
        setup.contract,
        mean_A.astype(np.float32),
        seed=setup.args.seed,
        steps=getattr(setup.model_config, "num_inference_steps", 10),
    )


def action_names(setup: Setup) -> list[str]:
    """The dataset's names of the action dimensions, or numbers."""
    info = setup.dataset.info
    return [info.action_names[i] if i < len(info.action_names) else f"action {i}" for i in range(info.action_dim)]


def save_prediction(prediction: Prediction, path: Path) -> None:
    arrays = {name: getattr(prediction, name) for name in ("recorded_NHA", "predicted_NHA", "valid_NH")}
    with path.open("wb") as file:
        np.savez_compressed(file, places=np.asarray(prediction.places), **arrays)


def load_prediction(path: Path) -> Prediction:
    with np.load(path, allow_pickle=False) as held:
        places = tuple((int(episode), int(frame)) for episode, frame in held["places"])
        return Prediction(places, held["recorded_NHA"], held["predicted_NHA"], held["valid_NH"])
