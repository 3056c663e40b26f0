"""GELU, exact or by tanh, in a form that the compiler makes fast code of for a CPU.

    y = x·Φ(x),  dy/dx = Φ(x) + x·Φ'(x),  Φ = (1 + erf(x/√2)) / 2  or  (1 + tanh(√(2/π)·(x + 0.044715·x³))) / 2

Inductor's erf, tanh and exp are calls for each vector, which spill all registers. Φ - ½ and dy/dx - ½ are odd, smooth
and constant in fp32 far out: x times a polynomial in x², at one multiply-add a degree where these are contracted
(`kernels.compiler`). Largest errors against fp64 in fp32: 5e-7 in y (torch's: 4e-7 with AVX2, 1e-6 with AVX-512)
and 3e-7 in dy/dx.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Odd(NamedTuple):
    """x·P(2·x²/reach² - 1), P by ascending coefficients, for |x| < reach."""

    reach: float
    coefficients: tuple[float, ...]


def _fit(function: Callable[[float], float], reach: float, degree: int) -> Odd:
    """The odd `function`, interpolated at Chebyshev's points: close to the best polynomial of the degree."""
    points = degree + 1
    angles = [math.pi * (k + 0.5) / points for k in range(points)]
    xs = [reach * math.sqrt((1 + math.cos(angle)) / 2) for angle in angles]
    values = [function(x) / x for x in xs]
    coefficients = [0.0] * points
    before, term = [0.0] * points, [1.0] + [0.0] * degree  # T_{j-1} and T_j, by powers of u
    for j in range(points):
        weight = math.fsum(y * math.cos(j * angle) for y, angle in zip(values, angles)) * (1 + (j > 0)) / points
        coefficients = [c + weight * t for c, t in zip(coefficients, term)]
        shifted = [0.0, *term[:-1]]
        before, term = term, shifted if j == 0 else [2 * s - b for s, b in zip(shifted, before)]
    return Odd(reach, tuple(coefficients))


_ROOT, _CUBE = math.sqrt(2 / math.pi), 0.044715


def _erf(x: float) -> float:
    return math.erf(x / math.sqrt(2)) / 2


def _erf_slope(x: float) -> float:
    return _erf(x) + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _tanh(x: float) -> float:
    return math.tanh(_ROOT * (x + _CUBE * x**3)) / 2


def _tanh_slope(x: float) -> float:
    return _tanh(x) + x * _ROOT * (1 + 3 * _CUBE * x * x) * (0.5 - 2 * _tanh(x) ** 2)


ERF, ERF_SLOPE = _fit(_erf, 5.6, 16), _fit(_erf_slope, 6.0, 18)
TANH, TANH_SLOPE = _fit(_tanh, 5.2, 20), _fit(_tanh_slope, 5.6, 21)


def _polynomial(square: Tensor, odd: Odd) -> Tensor:
    u = square * (2 / odd.reach**2) - 1
    p = torch.full_like(u, odd.coefficients[-1])
    for coefficient in odd.coefficients[-2::-1]:
        p = p * u + coefficient
    return p


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        odd = TANH if tanh else ERF
        wide = x.float()
        square = wide * wide
        y = torch.where(square >= odd.reach**2, wide.relu(), square * _polynomial(square, odd) + 0.5 * wide)
        # In torch 2.11 dynamo loses the gradient of an output that `to` hands back as it is.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        odd = TANH_SLOPE if ctx.tanh else ERF_SLOPE
        wide = x.float()
        square = wide * wide
        slope = torch.where(square >= odd.reach**2, (wide > 0).float(), wide * _polynomial(square, odd) + 0.5)
        return (grad.float() * slope).to(x.dtype), None


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """`F.gelu`, by erf or by `tanh`: where it is compiled fp32 inside and rounded once, else torch's own."""
    if torch.compiler.is_compiling():
        return _GELU.apply(x, tanh)
    return F.gelu(x, approximate="tanh" if tanh else "none")
