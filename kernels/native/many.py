"""AdamW and sums of squares over many tensors on a CPU, in one pass over memory, and a fast transposition: `many.c`.

torch's fused AdamW takes gradients of the weights' dtype and knows no low-precision copies: beside fp32 masters the
gradients are widened to memory and the masters rounded in passes of their own, 40 bytes a weight rather than 28. A
compiled loop over all tensors takes `torch.compile` minutes. Where these loops cannot be built, callers go on with
torch's kernel and say so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vlaforge.kernels.native.build import CHUNK, load
from vlaforge.kernels.native.calls import call, threads


class Native:
    """The loops of `many.c`, on flat CPU tensors of fp32 and bf16.

    Args:
        folder: where compiled libraries are kept.

    Raises NotBuilt.
    """

    def __init__(self, folder: Path):
        self.library = library = load(folder)
        self.has_tiles = bool(library.vlaforge_has_tiles())
        """Whether the processor has tiles (AMX), the loops were compiled for them, and the system grants them."""
        for size in (library.vlaforge_attention_room, library.vlaforge_depthwise_scratch):
            size.restype = ctypes.c_int64

    def adamw(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        params: Sequence[Tensor],
        ema: Sequence[Tensor],
        *,
        lr: Tensor,
        step: Tensor,
        scale: Tensor,
        ok: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        ema_decay: float,
    ) -> None:
        """`kernels.adamw.reference` in place. Weights, moments and averages are fp32, gradients fp32 or bf16, params
        bf16; `params` and `ema` may be empty. The i-th tensors all have one layout (`fits`). The 0-dim tensors (fp64,
        fp32, fp32, bool) are read by the loop itself, not by the host, as a captured step would."""
        absent = [None] * len(weights)
        lists = (weights, grads, _low(grads), exp_avgs, exp_avg_sqs, params or absent, ema or absent)
        fixed = (ctypes.c_double * 5)(beta1, beta2, eps, weight_decay, ema_decay)
        sizes = [weight.numel() for weight in weights]
        call(self.library.vlaforge_adamw, len(weights), sizes, *lists, lr, step, scale, ok, fixed, threads())

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Σ x² of each dense fp32 or bf16 tensor: fp32 [n]. Sums run in fp32, those of chunks in fp64."""
        out = torch.empty(len(tensors), dtype=torch.float32)
        partial = torch.empty(sum(-(-x.numel() // CHUNK) for x in tensors), dtype=torch.float32)
        sizes = [x.numel() for x in tensors]
        given = (len(tensors), sizes, tensors, _low(tensors), out, partial, threads())
        call(self.library.vlaforge_square_sums, *given)
        return out

    def transposed(self, x_MN: Tensor) -> Tensor:
        """[N, M] without gaps, of a bf16 [M, N] without gaps: three to eight times as fast as torch's copy."""
        out_NM = x_MN.new_empty(x_MN.shape[::-1])
        call(self.library.vlaforge_transpose, *x_MN.shape, x_MN, out_NM, threads())
        return out_NM


def readable(tensor: Tensor) -> bool:
    """Whether `square_sums` takes it: fp32 or bf16 on a CPU, filling one piece of memory in some order of its axes."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16) and _dense(tensor)


def fits(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, param: Tensor, ema: Tensor) -> bool:
    """Whether one place of `adamw`'s lists can be updated: one layout in memory, and dtypes that it takes. Give the
    weight again for a `param` or `ema` that there is not."""
    rest = (grad, exp_avg, exp_avg_sq, param, ema)
    alike = weight.is_contiguous() and all(x.is_contiguous() for x in rest)
    alike = alike or all(x.stride() == weight.stride() for x in rest)
    wide = all(x.dtype == torch.float32 for x in (weight, exp_avg, exp_avg_sq, ema))
    return alike and wide and (param is weight or param.dtype == torch.bfloat16) and readable(weight) and readable(grad)


def _dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != filled:
            return False
        filled *= size
    return True


def _low(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_uint8 * len(tensors))(*(tensor.dtype == torch.bfloat16 for tensor in tensors))
