"""RMS norms: plain, with Gemma's 1 + w, and modulated by a condition (AdaRMS). fp32 inside, the input's dtype out.

Axes: B samples, T tokens, D width, C condition width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms(x: Tensor, eps: float) -> Tensor:
    """x · (mean(x², last axis) + eps)^-½ in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps)


class RMSNorm(nn.Module):
    """rms(x) · (offset + weight).

    Args:
        offset: 0 is the usual norm (weight starts at one); 1 is Gemma's (weight starts at zero).
    """

    def __init__(self, dim: int, eps: float = 1e-6, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return (rms(x, self.eps) * (weight + self.offset if self.offset else weight)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, offset={self.offset}"


class NormWeight(nn.Module):
    """The weight [dim] of a norm that is computed elsewhere, under the official name."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class AdaRMSNorm(nn.Module):
    """rms(x) · (1 + scale) + shift, with (scale, shift, gate) = dense(condition); the gate belongs to the residual.

    `dense` starts at zero weight, so that a fresh layer does not depend on the condition.
    """

    def __init__(self, dim: int, condition: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(condition, 3 * dim)
        nn.init.zeros_(self.dense.weight)

    def forward(self, x_BTD: Tensor, condition_BC: Tensor) -> tuple[Tensor, Tensor]:
        """(normed [B, T, D] in x's dtype, gate [B, 1, D] in dense's)."""
        modulation_BM = self.modulation(condition_BC)
        return self.modulate(x_BTD, modulation_BM)

    def modulation(self, condition_BC: Tensor) -> Tensor:
        """[B, 3 D]: scale, shift, gate. It depends on the condition alone, so it may be made ahead of the layers."""
        return self.dense(condition_BC.to(self.dense.weight.dtype))

    def modulate(self, x_BTD: Tensor, modulation_BM: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = modulation_BM[:, None].chunk(3, dim=-1)
        return ada_rms(x_BTD, scale, shift, self.eps), gate

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


def ada_rms(x_BTD: Tensor, scale_B1D: Tensor, shift_B1D: Tensor, eps: float) -> Tensor:
    """rms(x) · (1 + scale) + shift, fp32 inside, x's dtype out."""
    return (rms(x_BTD, eps) * (1.0 + scale_B1D.float()) + shift_B1D.float()).to(x_BTD.dtype)
