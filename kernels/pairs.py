"""Rotary pairs in registers: how the two layouts of a head are read, turned and written.

`half` pairs channel i with i + K/2 (rotate-half: Gemma, Qwen); `interleaved` pairs 2i with 2i + 1 (Wan). Everything
between load and store works on the pair's two members [rows, PAIRS] and does not know the layout.
"""

from __future__ import annotations

from vlaforge.kernels.compat import tl, triton


@triton.jit
def load_pairs(ptr, at, row_ok, n_pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members, fp32 [ROWS, PAIRS], of the heads that start at offsets `at` [ROWS]; zero where masked."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)
        keep = row_ok[:, None] & (cols < 2 * n_pairs)[None, :]
        head = tl.load(ptr + at[:, None] + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(head, [ROWS, PAIRS, 2]))
    else:
        cols = tl.arange(0, PAIRS)
        keep = row_ok[:, None] & (cols < n_pairs)[None, :]
        a = tl.load(ptr + at[:, None] + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        b = tl.load(ptr + at[:, None] + n_pairs + cols[None, :], mask=keep, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(ptr, at, row_ok, n_pairs, a, b, ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Writes both members back, in the pointer's dtype."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)
        keep = row_ok[:, None] & (cols < 2 * n_pairs)[None, :]
        head = tl.reshape(tl.join(a, b), [ROWS, 2 * PAIRS])
        tl.store(ptr + at[:, None] + cols[None, :], head.to(ptr.dtype.element_ty), mask=keep)
    else:
        cols = tl.arange(0, PAIRS)
        keep = row_ok[:, None] & (cols < n_pairs)[None, :]
        tl.store(ptr + at[:, None] + cols[None, :], a.to(ptr.dtype.element_ty), mask=keep)
        tl.store(ptr + at[:, None] + n_pairs + cols[None, :], b.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def turn(a, b, cos, sin, CONJUGATE: tl.constexpr):
    """The rotation of the pairs by the table's angles, or by their negatives."""
    if CONJUGATE:
        sin = -sin
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def load_table(cos_ptr, sin_ptr, at, row_ok, n_pairs, PAIRS: tl.constexpr):
    """cos and sin, fp32 [ROWS, PAIRS], of the table rows that start at `at`."""
    cols = tl.arange(0, PAIRS)
    keep = row_ok[:, None] & (cols < n_pairs)[None, :]
    cos = tl.load(cos_ptr + at[:, None] + cols[None, :], mask=keep, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at[:, None] + cols[None, :], mask=keep, other=0.0).to(tl.float32)
    return cos, sin
