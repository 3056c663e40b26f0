"""Flow matching on the straight path between actions and noise, time running from 0 (actions) to 1 (noise).

    x_t = t · noise + (1 - t) · actions,   target velocity u = noise - actions,   loss = (u - v)²

Elements outside the mask carry no information: they enter as zeros (in x_t, so as noise alone) and leave with a loss of
zero, so whatever a padded step or dimension holds changes no bit of the result.

Axes: B samples, H action steps, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def flow_mix(noise_BHA: Tensor, actions_BHA: Tensor, mask_BHA: Tensor, time_B: Tensor) -> Tensor:
    """x_t, fp32 [B, H, A]. `mask` is True on real elements; NaN outside it does no harm."""
    time_B11 = time_B[:, None, None].float()
    return time_B11 * noise_BHA + (1.0 - time_B11) * actions_BHA.masked_fill(~mask_BHA, 0.0)


def flow_loss(velocity_BHA: Tensor, noise_BHA: Tensor, actions_BHA: Tensor, mask_BHA: Tensor) -> Tensor:
    """Squared error of the velocity, fp32 [B, H, A], zero outside the mask."""
    target_BHA = noise_BHA - actions_BHA.masked_fill(~mask_BHA, 0.0)
    return (target_BHA - velocity_BHA.float()).square().masked_fill(~mask_BHA, 0.0)


class FlowMix(nn.Module):
    """`flow_mix` as a module, so that a pass can put a kernel in its place."""

    def forward(self, noise_BHA: Tensor, actions_BHA: Tensor, mask_BHA: Tensor, time_B: Tensor) -> Tensor:
        return flow_mix(noise_BHA, actions_BHA, mask_BHA, time_B)


class FlowLoss(nn.Module):
    """`flow_loss` as a module, so that a pass can put a kernel in its place."""

    def forward(self, velocity_BHA: Tensor, noise_BHA: Tensor, actions_BHA: Tensor, mask_BHA: Tensor) -> Tensor:
        return flow_loss(velocity_BHA, noise_BHA, actions_BHA, mask_BHA)


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
