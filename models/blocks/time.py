"""Embedding of a flow-matching time by sines and cosines of geometrically spaced periods.

Axes: B samples, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sincos_time(time_B: Tensor, dim: int, min_period: float, max_period: float) -> Tensor:
    """fp32 [B, dim]: sines, then cosines, of 2π·t / period; dim/2 periods from min to max (openpi's ``posemb_sincos``).

    Angles are float64: 2π·t / 0.004 reaches 1571, where fp32 has lost four digits.
    """
    if dim % 2:
        raise ValueError(f"a sine-cosine embedding needs an even width, got {dim}")
    fraction = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=time_B.device)
    period = min_period * (max_period / min_period) ** fraction
    angle = (1.0 / period * 2.0 * math.pi)[None] * time_B.double()[:, None]
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


class SinCosTime(nn.Module):
    """`sincos_time` with its constants. It has no buffer, so nothing is lost when a model starts on the meta device."""

    def __init__(self, dim: int, min_period: float = 4e-3, max_period: float = 4.0):
        super().__init__()
        self.dim, self.min_period, self.max_period = dim, min_period, max_period

    def forward(self, time_B: Tensor) -> Tensor:
        return sincos_time(time_B, self.dim, self.min_period, self.max_period)

    def extra_repr(self) -> str:
        return f"{self.dim}, periods {self.min_period} to {self.max_period}"
