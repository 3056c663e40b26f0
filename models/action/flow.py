"""Flow matching on the straight path between actions and noise, time running from 0 (actions) to 1 (noise).

    x_t = t · noise + (1 - t) · actions,   target velocity u = noise - actions,   loss = (u - v)²

Elements outside the mask carry no information: they enter as zeros (in x_t, so as noise alone) and leave with a loss of
zero, so whatever a padded step or dimension holds changes no bit of the result.

Axes: B samples, H action steps, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn


class FlowMix(nn.Module):
    """Noise and actions at a time → (x_t, target), fp32; one module, so that a pass can put a kernel in its place.

    Args:
        towards: which end t = 1 is: ``noise`` as above, or ``data`` (GR00T), where noise and actions change places.
    """

    def __init__(self, towards: Literal["noise", "data"] = "noise"):
        super().__init__()
        self.towards = towards

    def forward(
        self, noise_BHA: Tensor, actions_BHA: Tensor, mask_BHA: Tensor, time_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`mask` is True on real elements; NaN outside it does no harm."""
        time_B11 = time_B[:, None, None].float()
        start, end = actions_BHA.masked_fill(~mask_BHA, 0.0), noise_BHA
        if self.towards == "data":
            start, end = end, start
        return time_B11 * end + (1.0 - time_B11) * start, end - start

    def extra_repr(self) -> str:
        return f"towards {self.towards}"


def squares(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Squared errors, fp32, zero outside the mask (of the prediction's shape)."""
    return (target - prediction.float()).square().masked_fill(~mask, 0.0)


class MaskedSquares(nn.Module):
    """Squared errors inside a mask → (their sum, their count), fp32 scalars; a module for the same reason."""

    def forward(self, prediction: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return squares(prediction, target, mask).sum(), mask.sum().float()


def euler(velocity: Callable[[Tensor, Tensor], Tensor], noise_BHA: Tensor, steps: int) -> Tensor:
    """Actions [B, H, A] from noise, by `steps` equal Euler steps from t = 1 to t = 0.

    Args:
        velocity: (x [B, H, A], time [B]) → velocity [B, H, A].
        steps: at least 1, else ValueError.
    """
    if steps < 1:
        raise ValueError(f"sampling needs at least one step, got {steps}")
    delta = -1.0 / steps
    x_BHA = noise_BHA
    for step in range(steps):
        time_B = torch.full(x_BHA.shape[:1], 1.0 + step * delta, dtype=torch.float32, device=x_BHA.device)
        x_BHA = x_BHA + delta * velocity(x_BHA, time_B)
    return x_BHA
