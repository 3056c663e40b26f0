"""Rotary position embedding in the rotate-half convention: channel i turns with channel i + K/2.

Tables are made once a forward and shared by all layers. One axis here; several axes (M-RoPE, video grids) only make
other tables, which `apply_rotary` takes as they are.

Axes: B samples, H heads, T tokens, K head width, J = K/2 frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlaforge.models.blocks.norms import rms


def rotary_table(positions_BT: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 [B, T, K/2]: angle = position · theta^(-2j/K)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BT.device) / head_dim
    angle_BTJ = positions_BT.float()[..., None] * (1.0 / theta**exponent)
    return angle_BTJ.cos(), angle_BTJ.sin()


def apply_rotary(x_BHTK: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor) -> Tensor:
    """Turns every head of x by the table; fp32 inside, x's dtype out.

    Of a table as wide as the head, whose halves are equal, only the first half is read.
    """
    half = x_BHTK.shape[-1] // 2
    # Worked on as [B, T, H, K], which is how projections lie in memory; the result is the same view of it.
    first, second = x_BHTK.transpose(1, 2).float().split(half, dim=-1)
    cos, sin = cos_BTJ[:, :, None, :half], sin_BTJ[:, :, None, :half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x_BHTK.dtype).transpose(1, 2)


def apply_rotary_pairs(x_BHTK: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor) -> Tensor:
    """The interleaved convention: neighbouring channels (2j, 2j + 1) turn together. fp32 inside, x's dtype out."""
    first, second = x_BHTK.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BTJ[:, None], sin_BTJ[:, None]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.flatten(-2).to(x_BHTK.dtype)


class Rotary(nn.Module):
    """`apply_rotary` as a module, so that a pass can put a kernel in its place."""

    def forward(self, x_BHTK: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor) -> Tensor:
        return apply_rotary(x_BHTK, cos_BTJ, sin_BTJ)


class HeadNormRotary(nn.Module):
    """RMSNorm of every query and key head alone, then their rotation; one module, so that a pass can put a kernel in
    its place. fp32 inside; rounded after the norm and after the rotation. The weights are the caller's."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(
        self, q_BHTK: Tensor, k_BGTK: Tensor, q_weight_K: Tensor, k_weight_K: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [B, H, T, K] and k [B, G, T, K], the table [B, T, K/2] → the same shapes and dtypes."""
        return (
            self._one(q_BHTK, q_weight_K, cos_BTJ, sin_BTJ),
            self._one(k_BGTK, k_weight_K, cos_BTJ, sin_BTJ),
        )

    def _one(self, x_BHTK: Tensor, weight_K: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor) -> Tensor:
        normed = (rms(x_BHTK, self.eps) * weight_K.float()).to(x_BHTK.dtype)
        return apply_rotary(normed, cos_BTJ, sin_BTJ)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
