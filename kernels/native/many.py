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
        self._adamw, self._square_sums = library.vlaforge_adamw, library.vlaforge_square_sums
        self._transpose = library.vlaforge_transpose
        self._adamw.restype = self._square_sums.restype = self._transpose.restype = None

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
        absent = (ctypes.c_void_p * len(weights))()
        fixed = (ctypes.c_double * 5)(beta1, beta2, eps, weight_decay, ema_decay)
        self._adamw(
            ctypes.c_int64(len(weights)),
            _sizes(weights),
            _addresses(weights),
            _addresses(grads),
            _low(grads),
            _addresses(exp_avgs),
            _addresses(exp_avg_sqs),
            _addresses(params) if params else absent,
            _addresses(ema) if ema else absent,
            *(ctypes.c_void_p(number.data_ptr()) for number in (lr, step, scale, ok)),
            fixed,
            torch.get_num_threads(),
        )

    def square_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Σ x² of each dense fp32 or bf16 tensor: fp32 [n]. Sums run in fp32, those of chunks in fp64."""
        out = torch.empty(len(tensors), dtype=torch.float32)
        partial = torch.empty(sum(-(-x.numel() // CHUNK) for x in tensors), dtype=torch.float32)
        self._square_sums(
            ctypes.c_int64(len(tensors)),
            _sizes(tensors),
            _addresses(tensors),
            _low(tensors),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(partial.data_ptr()),
            torch.get_num_threads(),
        )
        return out

    def transposed(self, x_MN: Tensor) -> Tensor:
        """[N, M] without gaps, of a bf16 [M, N] without gaps: three to eight times as fast as torch's copy."""
        out_NM = x_MN.new_empty(x_MN.shape[::-1])
        rows, columns = map(ctypes.c_int64, x_MN.shape)
        addresses = (ctypes.c_void_p(x.data_ptr()) for x in (x_MN, out_NM))
        self._transpose(rows, columns, *addresses, torch.get_num_threads())
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


def _sizes(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_int64 * len(tensors))(*(tensor.numel() for tensor in tensors))


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _low(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_uint8 * len(tensors))(*(tensor.dtype == torch.bfloat16 for tensor in tensors))
