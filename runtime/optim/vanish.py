"""How many low-precision weights an update leaves where they were, because it is below half a unit in their last place.

Only looked at where there are no fp32 masters: at a rate of 1e-5 most bf16 weights stand still, and the loss tells too
late. A few thousand values of the largest parameters are compared around a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlaforge.runtime.optim.base import LOW_PRECISION, Optimizer, local

PARAMETERS, VALUES = 8, 4096
TELLING = 0.5
"""A share of unmoved weights above which the run says so."""


class Unmoved:
    """Compares samples of low-precision weights around a step."""

    def __init__(self, optimizer: Optimizer):
        leaves = [leaf for leaf in optimizer.leaves if leaf.master is None and leaf.param.dtype in LOW_PRECISION]
        self.leaves = sorted(leaves, key=lambda leaf: -leaf.param.numel())[:PARAMETERS]
        self._before: list[Tensor] = []

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self.leaves)

    def _samples(self) -> list[Tensor]:
        flat = [local(leaf.param.data).reshape(-1) for leaf in self.leaves]
        return [values[:: max(1, values.numel() // VALUES)] for values in flat]

    def before(self) -> None:
        """Called before the step."""
        self._before = [values.clone() for values in self._samples()]

    def share(self) -> float:
        """After the step: the share of the sampled weights that are what they were (waits for the device)."""
        same = [(a == b).float().mean() for a, b in zip(self._before, self._samples())]
        return float(torch.stack(same).mean()) if same else 0.0
