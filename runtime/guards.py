"""Guards: a step whose loss or gradient is not finite, or whose loss spikes, is not taken. Decided on the
device.

The verdict comes from sums over all ranks, so all ranks refuse the same step; weights, moments, averages
and update counts stay as they were. Counters live on the device and are saved with the run. With float16,
gradients are scaled by a power of two that halves when they overflow and doubles after a quiet stretch;
refusing an overflow is ordinary and does not count towards stopping the run unless the scale cannot fall
further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

COUNTERS = ("skipped", "nonfinite", "spikes", "in_a_row", "overflows")


@dataclass(frozen=True)
class GuardConfig:
    """Args:
    spike_threshold: the largest loss that is trained on; None or inf for any.
    nonfinite: refuse a loss or gradient norm that is not finite.
    stop_after: refused steps in a row after which the run stops; 0 never stops.
    """

    spike_threshold: float | None = 100.0
    nonfinite: bool = True
    stop_after: int = 10


class Guard:
    """Judges steps and counts the refused ones. Everything is 0-dim int64 tensors on `device`."""

    def __init__(self, config: GuardConfig, device: torch.device | str):
        self.config = config
        self.counters = {name: torch.zeros((), dtype=torch.int64, device=device) for name in COUNTERS}

    def judge(self, loss: Tensor, norm: Tensor, overflow_counts: Tensor | None = None) -> Tensor:
        """Whether the step is taken: 0-dim bool. Updates the counters.

        Args:
            loss: the global loss.
            norm: the global gradient norm, unscaled.
            overflow_counts: with loss scaling, whether a non-finite gradient is a fault (the scale is at its
                least) rather than an overflow; None without.
        """
        finite_loss, finite = torch.isfinite(loss), torch.isfinite(loss) & torch.isfinite(norm)
        spike = finite_loss & (loss > self._threshold)
        overflow = torch.zeros_like(finite)
        if overflow_counts is not None:
            # fp16 gradients that overflow are never applied, whatever the flags say
            overflow = finite_loss & ~finite & ~overflow_counts
            ok = finite & ~spike
        else:
            ok = ~spike & (finite if self.config.nonfinite else torch.ones_like(finite))
        self._count(ok, spike & ~overflow, ~finite & ~overflow, overflow)
        return ok

    @property
    def _threshold(self) -> float:
        threshold = self.config.spike_threshold
        return float("inf") if threshold is None or threshold <= 0 else threshold

    def _count(self, ok: Tensor, spike: Tensor, nonfinite: Tensor, overflow: Tensor) -> None:
        counters, refused = self.counters, ~ok
        counters["skipped"].add_(refused)
        counters["spikes"].add_(spike)
        counters["nonfinite"].add_(nonfinite & refused)
        counters["overflows"].add_(overflow)
        fault = refused & ~overflow
        counters["in_a_row"].add_(fault).mul_(fault | overflow)

    def state(self) -> dict[str, int]:
        """The counters on the host (waits for the device)."""
        return {name: int(value) for name, value in self.counters.items()}

    def load(self, state: Mapping[str, int]) -> None:
        for name, value in self.counters.items():
            value.fill_(int(state.get(name, 0)))

    def fault(self, counters: Mapping[str, int], step: int) -> str | None:
        """The sentence to stop with when too many steps in a row were refused, else None."""
        count, limit = counters["in_a_row"], self.config.stop_after
        if not limit or count < limit:
            return None
        return (
            f"The last {count} steps up to step {step} were refused, because the loss or the gradient was "
            "not finite, or the loss was over --loss-spike-threshold "
            f"({self.config.spike_threshold}); the weights are those before them. Look at the samples of "
            "these steps, at the table of normalised ranges at the start of the log, and try a lower "
            "--lr-base or a longer --lr-warmup-iters."
        )


class LossScale:
    """A dynamic power-of-two factor on the loss for float16, on the device; 1 and inert for other dtypes.

    Args:
        enabled: scale at all.
        start, least, most: of the factor.
        quiet: updates without overflow after which it doubles.
    """

    def __init__(
        self,
        enabled: bool,
        device: torch.device | str,
        start: float = 2.0**16,
        least: float = 1.0,
        most: float = 2.0**24,
        quiet: int = 2000,
    ):
        self.enabled, self.least, self.most, self.quiet = enabled, least, most, quiet
        self.scale = torch.tensor(start if enabled else 1.0, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)

    def at_least(self) -> Tensor | None:
        """Whether the factor cannot fall further: 0-dim bool, None when scaling is off."""
        return self.scale <= self.least if self.enabled else None

    def update(self, finite: Tensor) -> None:
        """Halves the factor after an overflow, doubles it after `quiet` finite steps."""
        if not self.enabled:
            return
        self.good.add_(1).mul_(finite)
        grown = self.good >= self.quiet
        factor = torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(self.least, self.most)
        self.good.mul_(~grown)

    def state(self) -> dict[str, float]:
        return {"scale": float(self.scale), "good": int(self.good)}

    def load(self, state: Mapping[str, float]) -> None:
        if self.enabled and state:
            self.scale.fill_(float(state["scale"]))
            self.good.fill_(int(state["good"]))
