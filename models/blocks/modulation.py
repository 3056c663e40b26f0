"""AdaLN for groups of tokens: normalise, scale and shift; and the gated residual that closes the branch.

A modulation belongs to a sample, or to a frame of it, never to a token: tokens come in G equal groups, in order, and a
group shares its vector. Broadcasting does the rest; nothing of size [B, S, D] is made for the modulation.

Axes: B samples, S tokens, G groups, N tokens of a group (S = G·N), D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def in_groups(x_BSD: Tensor, groups: int) -> Tensor:
    """[B, S, D] seen as [B, G, N, D]."""
    b, s, d = x_BSD.shape
    return x_BSD.reshape(b, groups, s // groups, d)


class ModulatedLayerNorm(nn.Module):
    """LN(x)·(1 + scale) + shift, without a learned affine; fp32 inside, x's dtype out."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x_BSD: Tensor, scale_BGD: Tensor, shift_BGD: Tensor) -> Tensor:
        """x [B, S, D], scale and shift [B, G, D] → [B, S, D]."""
        normed_BGND = in_groups(F.layer_norm(x_BSD.float(), (self.dim,), eps=self.eps), scale_BGD.shape[1])
        shift_BG1D, gain_BG1D = shift_BGD[:, :, None].float(), scale_BGD[:, :, None].float() + 1.0
        out_BGND = torch.addcmul(shift_BG1D, normed_BGND, gain_BG1D)
        return out_BGND.reshape(x_BSD.shape).to(x_BSD.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class GatedAdd(nn.Module):
    """x + gate·y, with a gate for each group."""

    def forward(self, x_BSD: Tensor, y_BSD: Tensor, gate_BGD: Tensor) -> Tensor:
        """x, y [B, S, D], gate [B, G, D] of any float dtype → [B, S, D] in x's dtype."""
        gate_BG1D = gate_BGD[:, :, None].to(x_BSD.dtype)
        groups = gate_BGD.shape[1]
        return torch.addcmul(in_groups(x_BSD, groups), in_groups(y_BSD, groups), gate_BG1D).reshape(x_BSD.shape)
