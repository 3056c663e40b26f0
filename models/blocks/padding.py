"""Feature maps with constant rows and columns at their right and bottom.

Axes: N images, h w rows and columns, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Padded(torch.autograd.Function):
    """Forward one masked read, which the compiler joins with what follows; it copies everything for each `cat`.
    Backward the gradient of the fill from the padding alone, which is all that `where` would walk over the map for."""

    @staticmethod
    def forward(ctx: Any, x_NhwC: Tensor, fill_C: Tensor, down: int, right: int) -> Tensor:
        ctx.rows, ctx.columns = rows, columns = x_NhwC.shape[1:3]
        row, column = (torch.arange(n, device=x_NhwC.device) for n in (rows + down, columns + right))
        inside = (row[:, None] < rows) & (column < columns)
        return torch.where(inside[..., None], F.pad(x_NhwC, (0, 0, 0, right, 0, down)), fill_C)

    @staticmethod
    def backward(ctx: Any, grad_NhwC: Tensor) -> tuple[Tensor | None, ...]:
        inner, below = grad_NhwC[:, : ctx.rows], grad_NhwC[:, ctx.rows :]
        fill_C = None
        if ctx.needs_input_grad[1]:
            fill_C = inner[:, :, ctx.columns :].sum((0, 1, 2)) + below.sum((0, 1, 2))
        return inner[:, :, : ctx.columns], fill_C, None, None


def padded(x_NhwC: Tensor, fill_C: Tensor, down: int, right: int) -> Tensor:
    """[N, h + down, w + right, C]: x, and `fill_C` (of its dtype) everywhere else."""
    return _Padded.apply(x_NhwC, fill_C, down, right) if down or right else x_NhwC
