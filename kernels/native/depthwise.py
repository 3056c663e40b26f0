"""Depthwise 3 × 3 convolution on a CPU, channels-last: `depthwise.c`.

y[n, c, h, w] = bias[c] + Σ_rs weight[c, 0, r, s] · x[n, c, h + r - 1, w + s - 1], zeros outside: stride 1, padding 1.

The gradients of x and of the weight read the same nine values of the gradient of y, so one walk makes both, and the
bias's: a tensor is read or written once. Sums are fp32 and rounded once; those of a weight are made in an order that
the shape alone decides.

The tensors of X-VLA's `midsize` preset (batch 2, two cameras), coming from memory, one thread of a Xeon of 2023 with
other work beside it, torch 2.13, best of 99 in turn, ms. `copy` reads one tensor and writes one, as a forward must;
`add` reads two and writes one, as a backward must:

| | copy | torch | here | add | torch's backward | here |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| bf16 [4, 64, 56, 56] | 0.23 | 0.49 | 0.40 | 0.44 | 1.90 | 0.64 |
| bf16 [4, 128, 28, 28] | 0.11 | 0.28 | 0.20 | 0.22 | 0.99 | 0.34 |
| bf16 [4, 256, 14, 14] | 0.05 | 0.18 | 0.11 | 0.11 | 0.54 | 0.19 |
| bf16 [4, 512, 7, 7] | 0.02 | 0.13 | 0.07 | 0.06 | 0.33 | 0.13 |
| fp32 [4, 64, 56, 56] | 0.45 | 0.66 | 0.58 | 0.61 | 1.46 | 0.88 |
| fp32 [4, 128, 28, 28] | 0.22 | 0.38 | 0.29 | 0.30 | 0.85 | 0.42 |
| fp32 [4, 256, 14, 14] | 0.09 | 0.25 | 0.15 | 0.15 | 0.50 | 0.24 |
| fp32 [4, 512, 7, 7] | 0.05 | 0.22 | 0.12 | 0.09 | 0.46 | 0.21 |

With AVX2 alone fp32 takes 0.3 to 1.1 of torch's time, and bf16 a fiftieth: torch has no code for it there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.kernels.native import needed
from vlaforge.kernels.native.calls import call, op, threads


def _run(backward: bool, x_NCHW: Tensor, *tensors: Tensor | None) -> None:
    library = needed().library
    n, c, h, w = x_NCHW.shape
    room = torch.empty(call(library.vlaforge_depthwise_scratch, n, h, w, c, backward))
    function = library.vlaforge_depthwise_backward if backward else library.vlaforge_depthwise
    call(function, n, h, w, c, *tensors, room, x_NCHW.dtype == torch.bfloat16, threads())


def _last(x_NCHW: Tensor) -> Tensor:
    return x_NCHW.contiguous(memory_format=torch.channels_last)


def _forward_meta(x_NCHW: Tensor, weight_C133: Tensor, bias_C: Tensor | None) -> Tensor:
    return torch.empty_like(x_NCHW, memory_format=torch.channels_last)


def _forward_cpu(x_NCHW: Tensor, weight_C133: Tensor, bias_C: Tensor | None) -> Tensor:
    x_NCHW, y_NCHW = _last(x_NCHW), _forward_meta(x_NCHW, weight_C133, bias_C)
    _run(False, x_NCHW, x_NCHW, weight_C133.contiguous(), None if bias_C is None else bias_C.contiguous(), y_NCHW)
    return y_NCHW


def _backward_meta(grad_NCHW: Tensor, x_NCHW: Tensor, weight_C133: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx_NCHW = torch.empty_like(x_NCHW, memory_format=torch.channels_last)
    return dx_NCHW, weight_C133.new_empty(weight_C133.shape), weight_C133.new_empty(len(weight_C133))


def _backward_cpu(grad_NCHW: Tensor, x_NCHW: Tensor, weight_C133: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = _backward_meta(grad_NCHW, x_NCHW, weight_C133)
    _run(True, x_NCHW, _last(grad_NCHW), _last(x_NCHW), weight_C133.contiguous(), *out)
    return out


_forward = op("depthwise(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _forward_cpu, _forward_meta)
_backward = op(
    "depthwise_backward(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)",
    _backward_cpu,
    _backward_meta,
)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor, weight_C133: Tensor, bias_C: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NCHW, weight_C133)
        return _forward(x_NCHW, weight_C133, bias_C)

    @staticmethod
    def backward(ctx: Any, grad_NCHW: Tensor) -> tuple[Tensor | None, ...]:
        x_NCHW, weight_C133 = ctx.saved_tensors
        if not any(ctx.needs_input_grad[1:]):  # frozen: the same sum over the gradient, with the taps turned round
            return _forward(grad_NCHW, weight_C133.flip(2, 3), None), None, None
        grads = _backward(grad_NCHW, x_NCHW, weight_C133)
        return tuple(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=True))


def depthwise(x_NCHW: Tensor, weight_C133: Tensor, bias_C: Tensor | None) -> Tensor:
    """[N, C, H, W] in channels-last memory, fp32 or bf16, like the weight [C, 1, 3, 3] and the bias; differentiable."""
    return _Depthwise.apply(x_NCHW, weight_C133, bias_C)


def is_depthwise(conv: nn.Conv2d) -> bool:
    """Whether `depthwise` is this convolution."""
    same = conv.in_channels == conv.out_channels == conv.groups
    square = conv.kernel_size == (3, 3) and conv.stride == conv.dilation == (1, 1) and conv.padding in ((1, 1), "same")
    return same and square and conv.padding_mode == "zeros"


def takes(x_NCHW: Tensor, weight_C133: Tensor) -> bool:
    """Whether `depthwise` is for this input."""
    wanted = x_NCHW.device.type in ("cpu", "meta") and x_NCHW.dtype in (torch.float32, torch.bfloat16)
    last = x_NCHW.dim() == 4 and x_NCHW.is_contiguous(memory_format=torch.channels_last)
    return wanted and last and x_NCHW.dtype == weight_C133.dtype
