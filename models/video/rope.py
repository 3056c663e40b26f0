"""Rotary tables over video: three axes (frame, row, column) of any real positions, or one axis for actions and states.

Wan turns neighbouring channel pairs (2i, 2i+1) of a head by position · θ^(-i/n). In three dimensions the K/2 pairs of a
head go to frame, row and column in this order: K//6 pairs each for row and column, the rest for frame (128 channels:
22, 21, 21). Tables are made in float64 on the CPU and kept as real fp32 (cos, sin): no complex128 in any forward.

Axes: S tokens, K channels of a head, P = K/2 pairs; f h w sizes in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from vlaforge.models.blocks.norms import rms

THETA = 10000.0


def axis_pairs(head_dim: int, axes: int = 3) -> tuple[int, ...]:
    """How many channel pairs each axis turns: (frame, row, column), or all of them for one axis."""
    if head_dim % 2:
        raise ValueError(f"rotary embeddings need an even head dimension, got {head_dim}")
    if axes == 1:
        return (head_dim // 2,)
    side = head_dim // 6
    return (head_dim // 2 - 2 * side, side, side)


def video_positions(
    frames: Sequence[float] | int, rows: int, columns: int, *, row_start: float = 0.0, column_start: float = 0.0
) -> Tensor:
    """float64 [f·h·w, 3] positions of a grid of patches, frame by frame and row by row.

    `frames` is a count, or each frame's own position (an offset for later chunks, fractions for other rates).
    """
    count = range(frames) if isinstance(frames, int) else frames
    f = torch.tensor(list(count), dtype=torch.float64)
    h = torch.arange(rows, dtype=torch.float64) + row_start
    w = torch.arange(columns, dtype=torch.float64) + column_start
    return torch.cartesian_prod(f, h, w)


def table(positions: Tensor, head_dim: int, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """(cos, sin), fp32 [S, K/2] each, for positions [S, 3] (frame, row, column) or [S] (one axis over all of K).

    Positions may be fractional or negative (LingBot-VA's action tokens use rows and columns of -1).
    """
    grid = positions.double().reshape(positions.shape[0], -1)
    pairs = axis_pairs(head_dim, grid.shape[1])
    angles = []
    for axis, count in enumerate(pairs):
        frequency = theta ** -(torch.arange(count, dtype=torch.float64) / count)
        angles.append(grid[:, axis, None] * frequency)
    angle_SP = torch.cat(angles, dim=1)
    return angle_SP.cos().float(), angle_SP.sin().float()


@lru_cache(maxsize=64)
def cached_table(
    frames: Sequence[float] | int, rows: int, columns: int, head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`table` of a video grid on `device`, made once. `rows` of 0 asks for one axis: positions 0..frames-1."""
    # A table first asked for by a sampler must not be an inference tensor: training saves it for its backward.
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(frames) if rows == 0 else video_positions(frames, rows, columns)
        return tuple(part.to(device) for part in table(positions, head_dim))


def rotate_pairs(x_BSHK: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Turns neighbouring channel pairs of x [B, S, H, K] by (cos, sin) [S, K/2]; fp32."""
    pair = x_BSHK.float().unflatten(-1, (-1, 2))
    even, odd = pair[..., 0], pair[..., 1]
    cos, sin = cos_SP[:, None], sin_SP[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class QKNormRotary(nn.Module):
    """RMSNorm over all heads of a token together, then the rotary table, for queries and keys; one module, so that a
    pass can put a kernel in its place. fp32 inside, rounded once. The weights are the caller's."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(
        self, q_BSHK: Tensor, k_BSHK: Tensor, q_weight_E: Tensor, k_weight_E: Tensor, cos_SP: Tensor, sin_SP: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q, k [B, S, H, K], weights [H·K], table [S, K/2] → the same shapes and dtypes."""
        return self._one(q_BSHK, q_weight_E, cos_SP, sin_SP), self._one(k_BSHK, k_weight_E, cos_SP, sin_SP)

    def _one(self, x_BSHK: Tensor, weight_E: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
        normed = rms(x_BSHK.flatten(2), self.eps) * weight_E.float()
        return rotate_pairs(normed.view(x_BSHK.shape), cos_SP, sin_SP).to(x_BSHK.dtype)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
