"""What the training loop tells the outside: the loop calls, `forge-run` shows, evaluates and reports.

The trainer knows nothing of terminals or pictures. It calls these in order:

    started(trainer)              model built and loaded, before lowering and the first step
    planned(plan)                 what lowering will do, before it does
    note(text)                    a sentence for the log (weights' account, skipped step, checkpoint written)
    logged(step, metrics)         at each log point: what metrics.jsonl gets, on the first rank
    evaluate(trainer, step)       every --eval-interval steps: its result joins the metrics of that step
    finished(trainer)             after the last step, once the last checkpoint is written
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlaforge.graphs import Plan


class Hooks:
    """Does nothing; subclasses override what they need."""

    def started(self, trainer: Any) -> None:
        """`trainer.model` is the bare model on `trainer.device`; `trainer.completed` steps lie behind (resume)."""

    def planned(self, plan: Plan) -> None:
        """`plan` is settled, and nothing is changed yet."""
        self.note(plan.text())

    def note(self, text: str) -> None:
        """A sentence, or a block of lines such as the plan."""

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` counts from 1."""

    def evaluate(self, trainer: Any, step: int) -> Mapping[str, float]:
        """Metrics by name, such as ``eval_error``; empty when there is nothing to evaluate."""
        return {}

    def finished(self, trainer: Any) -> None:
        """The run is complete; `trainer.checkpoint` is the last checkpoint's folder, or None."""
