"""A convolution with more weights than values on a CPU, as a product of its patches: `patches.c`.

torch brings the weights of a convolution, and their gradient, to another order in memory in each call; where they
outweigh what they are multiplied with, as in the last stages of a tower, that takes longer than the products. A patch
is laid out here as the weights lie ([C, k, k]), which therefore stay where they are.

Forward and backward, stride 2, 3 × 3, one thread of a busy Xeon of 2023 (AMX), torch 2.13, best of 3 to 25 in turn, ms
(`tiles`: fp32 products as the plan has them there):

| x [N, C, h, w] → O | bf16 torch | here | fp32 torch | here | tiles |
| --- | ---: | ---: | ---: | ---: | ---: |
| [4, 128, 28, 28] → 256 (not taken) | 3.6 | 3.8 | 16.6 | 17.8 | 16.4 |
| [4, 256, 14, 14] → 512 | 9.2 | 5.1 | 38.4 | 17.1 | 14.2 |
| [6, 512, 28, 28] → 1024 | 121 | 112 | 559 | 424 | 321 |
| [6, 1024, 14, 14] → 2048 | 1004 | 288 | 1321 | 461 | 481 |

In bf16 the gradient of x is torch's own: as a product it would be rounded before it is summed.

Axes: N images, h w rows and columns, C channels; i j rows and columns of the result, O its channels; P = C·k·k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.kernels.cpu import Products
from vlaforge.kernels.native import needed
from vlaforge.kernels.native.calls import call, op, threads

LEAST_WEIGHTS, PLACES = 2**19, 2
"""Measured to pay from so many weights on, and up to so many places [i, j] of the batch an output channel."""


def _steps(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def _patches_meta(x_NhwC: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    n, h, w, c = x_NhwC.shape
    i, j = (_steps(size, kernel, stride, padding) for size in (h, w))
    return x_NhwC.new_empty(n, i, j, c * kernel * kernel)


def _patches_cpu(x_NhwC: Tensor, *geometry: int) -> Tensor:
    out = _patches_meta(x_NhwC, *geometry)
    sizes, low = (*x_NhwC.shape, *geometry), x_NhwC.dtype == torch.bfloat16
    call(needed().library.vlaforge_patches, sizes, x_NhwC.contiguous(), out, low, threads())
    return out


def _patches_backward_cpu(grad_NijP: Tensor, shape: Sequence[int], *geometry: int) -> Tensor:
    out = grad_NijP.new_empty(shape)
    call(needed().library.vlaforge_patches_backward, (*shape, *geometry), grad_NijP.contiguous(), out, threads())
    return out


_patches = op("patches(Tensor x, int kernel, int stride, int padding) -> Tensor", _patches_cpu, _patches_meta)
_patches_backward = op(
    "patches_backward(Tensor grad, int[] shape, int kernel, int stride, int padding) -> Tensor",
    _patches_backward_cpu,
    lambda grad, shape, *geometry: grad.new_empty(shape),
)


class _Patches(torch.autograd.Function):
    """[N, i, j, P], fp32."""

    @staticmethod
    def forward(ctx: Any, x_NhwC: Tensor, *geometry: int) -> Tensor:
        ctx.shape, ctx.geometry = x_NhwC.shape, geometry
        return _patches(x_NhwC, *geometry)

    @staticmethod
    def backward(ctx: Any, grad_NijP: Tensor) -> tuple[Tensor | None, ...]:
        return _patches_backward(grad_NijP, ctx.shape, *ctx.geometry), None, None, None


class _Convolution(torch.autograd.Function):
    """[N, i, j, O]; only the gradient of x is a convolution's."""

    @staticmethod
    def forward(ctx: Any, x_NhwC: Tensor, weight_OCkk: Tensor, bias_O: Tensor | None, *geometry: int) -> Tensor:
        patches_NijP = _patches(x_NhwC, *geometry)
        ctx.save_for_backward(x_NhwC, weight_OCkk, patches_NijP)
        ctx.geometry = geometry
        return F.linear(patches_NijP, weight_OCkk.flatten(1), bias_O)

    @staticmethod
    def backward(ctx: Any, grad_NijO: Tensor) -> tuple[Tensor | None, ...]:
        x_NhwC, weight_OCkk, patches_NijP = ctx.saved_tensors
        _, stride, padding = ctx.geometry
        dx, dweight, dbias = ctx.needs_input_grad[:3]
        grad_NOij, x_NChw = (value.permute(0, 3, 1, 2) for value in (grad_NijO, x_NhwC))
        rest = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, False, False])
        backward = torch.ops.aten.convolution_backward
        return (
            backward(grad_NOij, x_NChw, weight_OCkk, None, *rest)[0].permute(0, 2, 3, 1) if dx else None,
            (grad_NijO.flatten(0, 2).t() @ patches_NijP.flatten(0, 2)).view_as(weight_OCkk) if dweight else None,
            grad_NijO.sum((0, 1, 2)) if dbias else None,
            *(None,) * 3,
        )


def may_pay(conv: nn.Conv2d) -> bool:
    """Whether `convolution` is this convolution, and faster for some input."""
    square = len({*conv.kernel_size}) == len({*conv.stride}) == len({*conv.padding}) == 1 and conv.kernel_size[0] <= 16
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros" and conv.padding != "same"
    return square and plain and conv.weight.numel() >= LEAST_WEIGHTS


def pays(conv: nn.Conv2d, x_NhwC: Tensor) -> bool:
    """Whether it is for this input."""
    wanted = x_NhwC.device.type in ("cpu", "meta") and x_NhwC.dtype in (torch.float32, torch.bfloat16)
    (n, h, w, _), kernel, stride, padding = x_NhwC.shape, conv.kernel_size[0], conv.stride[0], conv.padding[0]
    places = n * _steps(h, kernel, stride, padding) * _steps(w, kernel, stride, padding)
    return wanted and x_NhwC.dtype == conv.weight.dtype and places <= PLACES * conv.out_channels


def convolution(conv: nn.Conv2d, x_NhwC: Tensor, products: Products) -> Tensor:
    """conv(x) → [N, i, j, O]."""
    geometry = (conv.kernel_size[0], conv.stride[0], conv.padding[0])
    weight_OCkk, bias_O = conv.weight, conv.bias
    if x_NhwC.dtype == torch.bfloat16:
        if not products.widened:
            return _Convolution.apply(x_NhwC, weight_OCkk, bias_O, *geometry)
        weight_OCkk, bias_O = weight_OCkk.float(), None if bias_O is None else bias_O.float()
    y_NijO = products.linear(_Patches.apply(x_NhwC.float(), *geometry), weight_OCkk.flatten(1), bias_O)
    return y_NijO.to(x_NhwC.dtype)
