"""Rotary embedding: the pairs of each head's channels are turned by a table of angles.

    (a, b) → (a · cos - b · sin,  b · cos + a · sin)

The table says what the positions mean (one axis, three axes of a video, Qwen's M-RoPE), the layout which channels are
a pair: `half` (i, i + K/2) or `interleaved` (2i, 2i + 1). fp32 inside, rounded once. The backward turns by the
negative angles; nothing but the table is saved.

Axes: B samples, T tokens, H heads, K channels of a head, P = K/2 pairs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import cdiv, launch, op, power_of_2, side_by_side
from vlaforge.kernels.pairs import load_pairs, load_table, store_pairs, turn
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch

Pairing = Literal["half", "interleaved"]


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, layout: Pairing = "half") -> Tensor:
    """The formula in plain torch."""
    wide, cos, sin = x.float(), cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    if layout == "half":
        a, b = wide.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)


# ---- kernels


@triton.jit
def _kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, n_rows, n_tokens, n_heads, n_pairs,
    x_b, x_t, x_h, y_b, y_t, y_h, table_b, table_t,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n_rows
    head, place = (rows % n_heads).to(tl.int64), rows // n_heads
    batch, token = (place // n_tokens).to(tl.int64), (place % n_tokens).to(tl.int64)
    cos, sin = load_table(cos_ptr, sin_ptr, batch * table_b + token * table_t, row_ok, n_pairs, PAIRS)
    a, b = load_pairs(x_ptr, batch * x_b + token * x_t + head * x_h, row_ok, n_pairs, ROWS, PAIRS, INTERLEAVED)
    a, b = turn(a, b, cos, sin, CONJUGATE)
    store_pairs(y_ptr, batch * y_b + token * y_t + head * y_h, row_ok, n_pairs, a, b, ROWS, PAIRS, INTERLEAVED)


# ---- launchers and registration


def strides_alike(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables that a kernel can read by cos's strides: as they are (halves of wider ones, too), or copies."""
    if cos.stride() == sin.stride() and cos.stride(-1) == 1:
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _fake(x, cos, sin, interleaved, conjugate):
    return torch.empty_like(side_by_side(x))


@op("rotary", _fake)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> Tensor:
    x, (cos, sin) = side_by_side(x), strides_alike(cos, sin)
    (b, t, h, _), pairs = x.shape, cos.shape[-1]
    y = torch.empty_like(x)
    width = power_of_2(pairs)
    rows = max(1, min(32, 1024 // width))
    launch(
        _kernel, (cdiv(b * t * h, rows),), x, cos, sin, y, b * t * h, t, h, pairs, *x.stride()[:3], *y.stride()[:3],
        cos.stride(0) if cos.ndim == 3 else 0, cos.stride(-2),
        ROWS=rows, PAIRS=width, INTERLEAVED=interleaved, CONJUGATE=conjugate, num_warps=4,
    )  # fmt: skip
    return y


def _save(ctx, inputs, output):
    _, cos, sin, ctx.interleaved, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx, dy):
    return _rotate(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate), None, None, None, None


_rotate.register_autograd(_gradients, setup_context=_save)


# ---- public


def check_table(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """ValueError unless cos and sin are [T, K/2] or [B, T, K/2] for x [B, T, H, K]."""
    b, t, _, k = x.shape
    if cos.shape != sin.shape or tuple(cos.shape) not in ((t, k // 2), (b, t, k // 2), (1, t, k // 2)) or k % 2:
        raise ValueError(
            f"x {list(x.shape)} needs cos and sin of [{t}, {k // 2}] or [{b}, {t}, {k // 2}], "
            f"not {list(cos.shape)} and {list(sin.shape)}"
        )


def supports(x: Tensor, cos: Tensor, sin: Tensor, **_) -> Decision:
    """fp32 / bf16 / fp16, heads of up to 512 channels, a table that is not trained."""
    if x.dtype not in FLOATS:
        return Decision(False, f"rotary takes fp32, bf16 or fp16, not {x.dtype}")
    if x.shape[-1] > 512:
        return Decision(False, f"rotary takes heads of up to 512 channels, not {x.shape[-1]}")
    if cos.requires_grad or sin.requires_grad:
        return Decision(False, "rotary gives no gradient to its table")
    return YES


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, layout: Pairing = "half") -> Tensor:
    """`x` [B, T, H, K] turned by `cos`, `sin` [T, K/2] or [B, T, K/2]; memory order and dtype as x's.

    Any strides will do: for q [B, H, T, K] pass ``q.transpose(1, 2)``.

    Raises:
        ValueError: a table of another shape.
    """
    check_table(x, cos, sin)
    if cos.ndim == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    if not dispatch("rotary", x, supports(x, cos, sin)):
        return reference(x, cos, sin, layout=layout)
    return _rotate(x, cos, sin, layout == "interleaved", False)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    b, t, h, k = (case.sizes[axis] for axis in ("B", "T", "H", "K"))
    x = torch.randn(b, t, h, k, device=device, generator=generator).to(dtype)
    shape = (b, t, k // 2) if case.sizes.get("per_sample") else (t, k // 2)
    angle = torch.rand(shape, device=device, generator=generator) * 100
    return {"x": x, "cos": angle.cos(), "sin": angle.sin(), "layout": case.sizes["layout"]}


KERNEL = KernelSpec(
    name="rotary",
    formula="(a·cos - b·sin, b·cos + a·sin) on channel pairs",
    op=rotary,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("x",),
    caps={"B": 2, "T": 5, "H": 5},
    cases=(
        Case("pi05 q", {"B": 32, "T": 812, "H": 8, "K": 256, "layout": "half", "per_sample": True}),
        Case("pi05 k", {"B": 32, "T": 812, "H": 1, "K": 256, "layout": "half", "per_sample": True}),
        Case("wan 5b, three axes", {"B": 8, "T": 1024, "H": 24, "K": 128, "layout": "interleaved"}),
        Case("qwen3-vl vision", {"B": 1, "T": 4096, "H": 16, "K": 64, "layout": "half"}),
        Case("odd", {"B": 3, "T": 7, "H": 3, "K": 44, "layout": "interleaved", "per_sample": True}),
        Case("odd half", {"B": 3, "T": 7, "H": 3, "K": 22, "layout": "half"}),
    ),
)
