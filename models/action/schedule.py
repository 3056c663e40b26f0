"""Flow matching on a shifted noise axis, as the world-action models train and sample it.

    σ(u) = s·u / (1 + (s-1)·u)        u ~ U(0, 1), s the shift: s > 1 spends more of training and sampling at high noise
    x    = (1-σ)·x0 + σ·ε             the model predicts the velocity ε - x0; its time is t = steps·σ
    w(t) = (y(t) - min y) / mean(y - min y),  y(t) = exp(-2·((t - steps/2)/steps)²)      the "bell" weight

min and mean are taken over the training grid: `steps` values of t from steps·σ(1) downwards. FastWAM draws u and weighs
continuous t; LingBot-VA and DreamZero draw an index of the grid. Facts: Wan's ``FlowMatchScheduler`` and FastWAM's
``WanContinuousFlowMatchScheduler``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

EPS = 1e-10  # FastWAM's, in the weight's denominator


@dataclass(frozen=True)
class ShiftedFlow:
    """One modality's schedule.

    Args:
        shift: s of the training grid, positive.
        steps: T, the range of time (t runs from 0, clean, to T, noise).
        sample_shift: s of the sampling grid; None takes `shift`.
    """

    shift: float = 5.0
    steps: int = 1000
    sample_shift: float | None = None

    def __post_init__(self) -> None:
        for shift in (self.shift, self.sample_shift):
            if shift is not None and not shift > 0:
                raise ValueError(f"the shift of a schedule must be positive, got {shift}")
        if self.steps < 1:
            raise ValueError(f"a schedule needs at least one step, got {self.steps}")

    def sigma(self, u: Tensor) -> Tensor:
        """Uniform numbers in [0, 1] → noise levels in [0, 1], elementwise."""
        return self.shift * u / (1.0 + (self.shift - 1.0) * u)

    def time(self, u: Tensor) -> Tensor:
        """Uniform numbers in [0, 1] → times in [0, T]."""
        return self.sigma(u) * float(self.steps)

    def noised(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """(1-σ)·clean + σ·noise at `time`, which broadcasts from the left ([B], or [B, F] for a level a frame)."""
        sigma = (time / float(self.steps)).to(clean.dtype)
        sigma = sigma.reshape(*sigma.shape, *[1] * (clean.ndim - sigma.ndim))
        return (1 - sigma) * clean + sigma * noise

    def weight(self, time: Tensor) -> Tensor:
        """The bell weight at continuous times, fp32; 0 at t = T, 1 in the mean over the training grid."""
        return (self._bell(time.float()) - self._lowest) / (self._mean + EPS)

    @cached_property
    def grid(self) -> tuple[float, ...]:
        """The T training times, decreasing from T (σ = linspace(1, 0, T+1) without its end, shifted)."""
        return tuple(_shifted(1.0 - i / self.steps, self.shift) * self.steps for i in range(self.steps))

    def grid_times(self, index: Tensor) -> Tensor:
        """int64 indices into `grid` → fp32 times of the same shape (index 0 is pure noise)."""
        u = 1.0 - index.double() / self.steps
        return (self.shift * u / (1.0 + (self.shift - 1.0) * u) * self.steps).float()

    def sampling(self, count: int) -> tuple[list[float], list[float]]:
        """(times, deltas) of `count` Euler steps: x += velocity · delta at each time, from noise to data.

        σ runs over linspace(1, 0, count+1), shifted by `sample_shift`; delta = σ_next - σ is negative and the last σ
        is 0.
        """
        if count < 1:
            raise ValueError(f"sampling needs at least one step, got {count}")
        shift = self.shift if self.sample_shift is None else self.sample_shift
        sigmas = [_shifted(1.0 - i / count, shift) for i in range(count + 1)]
        return [sigma * self.steps for sigma in sigmas[:-1]], [b - a for a, b in pairwise(sigmas)]

    def _bell(self, time: Tensor) -> Tensor:
        return torch.exp(-2.0 * ((time - self.steps / 2.0) / self.steps) ** 2)

    @cached_property
    def _grid_bell(self) -> list[float]:
        return [math.exp(-2.0 * ((t - self.steps / 2.0) / self.steps) ** 2) for t in self.grid]

    @cached_property
    def _lowest(self) -> float:
        return min(self._grid_bell)

    @cached_property
    def _mean(self) -> float:
        return sum(y - self._lowest for y in self._grid_bell) / self.steps


def _shifted(u: float, shift: float) -> float:
    return shift * u / (1.0 + (shift - 1.0) * u)
