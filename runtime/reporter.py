"""From a step's device metrics to a row of the log, and to words where a number alone does not say it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Minibatch
from vlaforge.runtime.guards import Guard
from vlaforge.runtime.hooks import Hooks
from vlaforge.runtime.metrics import Log, OnTheWay
from vlaforge.runtime.ranks import Ranks

REMEMBERED = 64
"""Steps whose samples are remembered, to name them when a step was skipped."""
SHOWN = 16


class Reporter:
    """Writes rows when they have left the device, remarks on them, and stops the run when its guard asks for it.

    Args:
        log, hooks: where rows and sentences go; only the leading rank's say anything.
        guard: the run's guard.
        ranks: the other processes.
        stages: print stage times (``--timing-log-level 1``).
    """

    def __init__(self, log: Log, hooks: Hooks, guard: Guard, ranks: Ranks, stages: bool):
        self.backends, self.hooks, self.guard, self.ranks, self.stages = log, hooks, guard, ranks, stages
        self._waiting: OnTheWay | None = None
        self._skipped = guard.state()["skipped"]
        self._samples: deque[tuple[int, list[int]]] = deque(maxlen=REMEMBERED)

    def taken(self, step: int, minibatches: Sequence[Minibatch]) -> None:
        """Remembers which samples `step` was taken on."""
        self._samples.append((step, [i for minibatch in minibatches for i in minibatch.ids.tolist()]))

    def log(self, step: int, metrics: Mapping[str, Tensor], facts: Mapping[str, float], now: bool) -> None:
        """Sends one row on its way; it is written when it has arrived, at once when `now`."""
        self.flush()
        self._waiting = OnTheWay(step, metrics, facts)
        if self._waiting.here or now:
            self.flush()

    def flush(self) -> None:
        """Writes the row that is on its way, when there is one. Raises UserError after too many skipped steps."""
        if self._waiting is None:
            return
        row, self._waiting = self._waiting.row(), None
        self.backends.write(row)
        if self.ranks.leads:
            self.hooks.logged(int(row["step"]), row)
            self._remark(row)
        fault = self.guard.fault(row, int(row["step"]))
        if fault is not None:
            raise UserError(f"{fault} {self._of(row['in_a_row'], int(row['step']))}".rstrip())

    def _remark(self, row: Mapping[str, Any]) -> None:
        if row["skipped"] > self._skipped:
            count, self._skipped = row["skipped"] - self._skipped, row["skipped"]
            self.hooks.note(
                f"step {row['step']}: {count} skipped since the last line (loss {row['loss']:g}, gradient norm "
                f"{row['grad_norm']:g}); {row['skipped']} in all. {self._of(count, int(row['step']))}".rstrip()
            )
        stages = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
        if stages and self.stages:
            self.hooks.note("stages: " + ", ".join(f"{name} {value:.1f} ms" for name, value in stages.items()))

    def _of(self, count: int, step: int) -> str:
        """Which samples this rank took the last `count` steps up to `step` on."""
        rows = [i for taken, ids in self._samples if step - count < taken <= step for i in ids]
        if not rows:
            return ""
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return f"Dataset rows: {', '.join(map(str, rows[:SHOWN]))}{more}."


def check_distinct(ranks: Ranks, minibatches: Sequence[Minibatch]) -> None:
    """UserError when two ranks are given the same samples in the same order: each would do the other's work."""
    ids = [int(i) for minibatch in minibatches for i in minibatch.ids]
    everybody = ranks.gather(ids)
    for rank, other in enumerate(everybody):
        for earlier in range(rank):
            if other and other == everybody[earlier]:
                raise UserError(
                    f"Ranks {earlier} and {rank} read the same {len(other)} samples in the first step: the loader of "
                    "the step program does not divide the data by rank."
                )
