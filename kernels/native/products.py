"""fp32 products on the tiles of a CPU with AMX, as accurate as the library's: `products.c`."""

from __future__ import annotations

from torch import Tensor

from vlaforge.kernels.native.calls import call, threads
from vlaforge.kernels.native.many import Native

LEAST_REUSE = 64
"""Multiplications a value of the three matrices below which the library is faster: laying out in tiles must pay."""


def pays(rows: int, columns: int, depth: int) -> bool:
    """Whether [rows, depth] x [depth, columns] has enough work a value."""
    work = rows * columns * depth
    return work >= LEAST_REUSE * (rows * depth + depth * columns + rows * columns)


def product(native: Native, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a · b + bias [M, N], fp32 on a CPU; any strides, no axis empty. Error against fp64 as that of an fp32 product or
    less; infinity gives NaN. Raises MemoryError."""
    a_MK, b_KN = _straight(a_MK), _straight(b_KN)
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    bias_N = None if bias_N is None else bias_N.contiguous()
    sizes = (*out_MN.shape, a_MK.shape[1])
    factors = (a_MK, *a_MK.stride(), b_KN, *b_KN.stride())
    if call(native.library.vlaforge_product, *sizes, *factors, bias_N, out_MN, out_MN.stride(0), threads()):
        raise MemoryError(f"no memory for a product of {sizes[0]} x {sizes[2]} and {sizes[2]} x {sizes[1]}")
    return out_MN


def _straight(x: Tensor) -> Tensor:
    """`x` with one of its strides 1; an axis of one value may have any."""
    if 1 in x.stride():
        return x
    return x.contiguous()
