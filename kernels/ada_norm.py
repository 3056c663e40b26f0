"""Adaptive norm: AdaRMSNorm and AdaLN modulation.

    y = n(x) · (1 + scale) + shift
    n(x) = x · (mean(x²) + eps)^-½                          kind "rms"
    n(x) = (x - mean(x)) · (var(x) + eps)^-½                kind "layer"

Scale and shift have one row a sample, a frame or a token (see `modulation`). All of it is fp32, rounded once.

Backward, with x̂ = n(x), r the reciprocal root and h = dy · (1 + scale):
    dx = r · (h - mean(h)[layer only] - x̂ · mean(h · x̂)),  dscale = Σ_tokens dy · x̂,  dshift = Σ_tokens dy.

Axes: B samples, T tokens, S segments, D channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import MAX_WIDTH, cdiv, launch, only_first_has_gradient, op, row_tile, side_by_side
from vlaforge.kernels.modulation import (
    Spread,
    add_shares,
    room_for_shares,
    segment_bounds,
    segment_of,
    segments,
    spread,
    tokens,
)
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch

Kind = Literal["rms", "layer"]


def reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    kind: Kind = "rms",
    eps: float = 1e-6,
    index: Tensor | None = None,
) -> Tensor:
    """The formula in plain torch."""
    wide = tokens(x).float()
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    parts = (segments(m, x, index is not None) for m in (scale, shift))
    unit, scale, shift = spread(unit, index, *parts)
    return (unit * (scale.float() + 1.0) + shift.float()).reshape(x.shape).to(x.dtype)


# ---- kernels


@triton.jit
def _forward_kernel(
    x_ptr, scale_ptr, shift_ptr, index_ptr, y_ptr, mean_ptr, rstd_ptr, n_rows, n_tokens, run, n_cols,
    x_b, x_t, scale_b, scale_s, shift_b, shift_s, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)[None, :]
    row_ok = rows < n_rows
    keep = row_ok[:, None] & (cols < n_cols)
    batch, token = (rows // n_tokens).to(tl.int64), rows % n_tokens
    segment = segment_of(token, row_ok, run, index_ptr)
    x = tl.load(x_ptr + (batch * x_b + token * x_t)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
    if LAYER:
        mean = tl.sum(x, axis=1) / n_cols
        tl.store(mean_ptr + rows, mean, mask=row_ok)
        x = tl.where(keep, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)
    scale_at = (batch * scale_b + segment * scale_s)[:, None] + cols
    shift_at = (batch * shift_b + segment * shift_s)[:, None] + cols
    scale = tl.load(scale_ptr + scale_at, mask=keep, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + shift_at, mask=keep, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * (scale + 1.0) + shift
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, scale_ptr, starts_ptr, mean_ptr, rstd_ptr, dx_ptr, dscale_ptr, dshift_ptr,
    n_segments, n_tokens, run, n_cols, dy_b, dy_t, x_b, x_t, scale_b, scale_s,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, LAYER: tl.constexpr,
):  # fmt: skip
    """One program a (sample, segment) and share of its tokens: dx, and this share's sums for scale and shift."""
    pair, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, segment = (pair // n_segments).to(tl.int64), pair % n_segments
    first, last = segment_bounds(segment, run, starts_ptr)
    cols = tl.arange(0, WIDTH)
    col_ok = cols < n_cols
    scale = tl.load(scale_ptr + batch * scale_b + segment * scale_s + cols, mask=col_ok, other=0.0)
    gain = scale.to(tl.float32)[None, :] + 1.0
    dscale = tl.zeros([WIDTH], dtype=tl.float32)
    dshift = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(first + share * ROWS, last, shares * ROWS):
        token = start + tl.arange(0, ROWS)
        row_ok = token < last
        keep = row_ok[:, None] & col_ok[None, :]
        row = batch * n_tokens + token
        x_at = (batch * x_b + token.to(tl.int64) * x_t)[:, None] + cols[None, :]
        dy_at = (batch * dy_b + token.to(tl.int64) * dy_t)[:, None] + cols[None, :]
        x = tl.load(x_ptr + x_at, mask=keep, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at, mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row_ok, other=0.0)[:, None]
        if LAYER:
            x -= tl.load(mean_ptr + row, mask=row_ok, other=0.0)[:, None]
        unit = tl.where(keep, x * rstd, 0.0)
        if dscale_ptr is not None:
            dscale += tl.sum(dy * unit, axis=0)
            dshift += tl.sum(dy, axis=0)
        h = dy * gain
        dx = h - unit * (tl.sum(h * unit, axis=1)[:, None] / n_cols)
        if LAYER:
            dx -= tl.sum(h, axis=1)[:, None] / n_cols
        tl.store(dx_ptr + row[:, None] * n_cols + cols[None, :], (dx * rstd).to(dx_ptr.dtype.element_ty), mask=keep)
    if dscale_ptr is not None:
        out = (share.to(tl.int64) * tl.num_programs(0) + pair) * n_cols + cols
        tl.store(dscale_ptr + out, dscale.to(dscale_ptr.dtype.element_ty), mask=col_ok)
        tl.store(dshift_ptr + out, dshift.to(dshift_ptr.dtype.element_ty), mask=col_ok)


# ---- launchers and registration


def _forward_fake(x, scale, shift, index, layer, eps):
    n = x.shape[0] * x.shape[1]
    stats = [x.new_empty(size, dtype=torch.float32) for size in (n if layer else 0, n)]
    return x.new_empty(x.shape), *stats


@op("ada_norm", _forward_fake)
def _forward(
    x: Tensor, scale: Tensor, shift: Tensor, index: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x, scale, shift = side_by_side(x), side_by_side(scale), side_by_side(shift)
    (b, t, d), tile, over = x.shape, row_tile(x.shape[-1]), Spread.of(x, scale, index)
    y, mean, rstd = _forward_fake(x, scale, shift, index, layer, eps)
    launch(
        _forward_kernel, (cdiv(b * t, tile.rows),), x, scale, shift, index, y, mean, rstd, b * t, t, over.run, d,
        x.stride(0), x.stride(1), *scale.stride()[:2], *shift.stride()[:2], eps,
        ROWS=tile.rows, WIDTH=tile.width, LAYER=layer, num_warps=tile.num_warps,
    )  # fmt: skip
    return y, mean, rstd


def _backward_fake(dy, x, scale, index, mean, rstd, layer, modulated):
    shape = scale.shape if modulated else (0,)
    return x.new_empty(x.shape), scale.new_empty(shape), scale.new_empty(shape)


@op("ada_norm_backward", _backward_fake)
def _backward(
    dy: Tensor, x: Tensor, scale: Tensor, index: Tensor | None, mean: Tensor, rstd: Tensor, layer: bool, modulated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`modulated`: whether scale and shift get gradients; empty ones otherwise."""
    dy, x, scale = side_by_side(dy), side_by_side(x), side_by_side(scale)
    (b, t, d), tile, over = x.shape, row_tile(x.shape[-1], backward=True), Spread.of(x, scale, index, True)
    shares = over.shares(tile.rows, 1, x.device)
    dx = x.new_empty(x.shape)
    dscale, dshift = (room_for_shares(shares, scale) if modulated else None for _ in range(2))
    launch(
        _backward_kernel, (b * over.segments, shares), dy, x, scale, over.starts, mean, rstd, dx, dscale, dshift,
        over.segments, t, over.run, d, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), *scale.stride()[:2],
        ROWS=tile.rows, WIDTH=tile.width, LAYER=layer, num_warps=tile.num_warps,
    )  # fmt: skip
    if dscale is None or dshift is None:
        return dx, scale.new_empty(0), scale.new_empty(0)
    return dx, add_shares(dscale, scale), add_shares(dshift, scale)


def _save(ctx, inputs, output):
    x, scale, shift, index, ctx.layer, _ = inputs
    ctx.shift_dtype = shift.dtype
    ctx.save_for_backward(x, scale, index, *output[1:])
    only_first_has_gradient(ctx, output)


def _gradients(ctx, dy, *_):
    x, scale, index, mean, rstd = ctx.saved_tensors
    _, scale_grad, shift_grad, *_ = ctx.needs_input_grad
    dx, dscale, dshift = _backward(dy, x, scale, index, mean, rstd, ctx.layer, scale_grad or shift_grad)
    modulation = dscale if scale_grad else None, dshift.to(ctx.shift_dtype) if shift_grad else None
    return dx, *modulation, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(x: Tensor, scale: Tensor, shift: Tensor, **_) -> Decision:
    """Rows up to 8192 channels, fp32 / bf16 / fp16."""
    for name, tensor in (("x", x), ("scale", scale), ("shift", shift)):
        if tensor.dtype not in FLOATS:
            return Decision(False, f"ada_norm takes fp32, bf16 or fp16, and {name} is {tensor.dtype}")
    if not 0 < x.shape[-1] <= MAX_WIDTH:
        return Decision(False, f"ada_norm takes rows of up to {MAX_WIDTH} channels, not {x.shape[-1]}")
    return YES


def ada_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    kind: Kind = "rms",
    eps: float = 1e-6,
    index: Tensor | None = None,
) -> Tensor:
    """``norm(x) · (1 + scale) + shift`` for x [B, ..., D], of x's dtype.

    Args:
        scale, shift: [B, D], [B, 1, D], [B, S, D] with S dividing the tokens, or [B, T, D]; views (such as chunks of
            one projection) are read in place. A batch of 1 stands for all samples.
        kind: statistic, ``rms`` or ``layer`` (LayerNorm without its affine part).
        eps: added to the mean square or variance.
        index: int32 or int64 [T], not decreasing: the segment of each token, where segments differ in length.

    Raises:
        ValueError: a scale or shift that does not spread over x, or an unknown `kind`.
    """
    if kind not in ("rms", "layer"):
        raise ValueError(f"ada_norm has the kinds 'rms' and 'layer', not {kind!r}")
    if not dispatch("ada_norm", x, supports(x, scale, shift)):
        return reference(x, scale, shift, kind=kind, eps=eps, index=index)
    indexed = index is not None
    scale_BSD, shift_BSD = segments(scale, x, indexed), segments(shift, x, indexed)
    if shift_BSD.shape != scale_BSD.shape:
        raise ValueError(f"scale {list(scale.shape)} and shift {list(shift.shape)} have different rows")
    return _forward(tokens(x), scale_BSD, shift_BSD, index, kind == "layer", eps)[0].reshape(x.shape)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    b, s, run, d = (case.sizes[axis] for axis in ("B", "S", "L", "D"))
    x = torch.randn(b, s * run, d, device=device, generator=generator)
    # Scale, shift and gate are thirds of one projection, as models have them.
    packed = torch.randn(case.sizes.get("M", b), s, 3 * d, device=device, generator=generator) * 0.5
    scale, shift, _ = packed.to(case.sizes.get("modulation", dtype)).chunk(3, dim=-1)
    inputs = {"x": (x + 0.3).to(dtype), "scale": scale, "shift": shift, "kind": case.sizes["kind"]}
    if case.sizes.get("indexed"):
        lengths = torch.arange(s, device=device) % 3 * run
        lengths[-1] = s * run - lengths[:-1].sum()
        index = torch.repeat_interleave(torch.arange(s, device=device), lengths, output_size=s * run)
        inputs["index"] = index.to(torch.int32)
    return inputs


KERNEL = KernelSpec(
    name="ada_norm",
    formula="norm(x) · (1 + scale) + shift, norm RMS or LayerNorm",
    op=ada_norm,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("x", "scale", "shift"),
    caps={"B": 2, "M": 2, "S": 4, "L": 5},
    cases=(
        Case("pi05 expert, per sample", {"B": 32, "S": 1, "L": 50, "D": 1024, "kind": "rms"}),
        Case("gr00t dit, per sample", {"B": 32, "S": 1, "L": 51, "D": 1536, "kind": "layer"}),
        Case("fastwam video, per frame", {"B": 16, "S": 3, "L": 98, "D": 3072, "kind": "layer"}),
        Case(
            "lingbot, per frame, one for all samples, fp32",
            {"B": 2, "M": 1, "S": 26, "L": 136, "D": 3072, "kind": "layer", "modulation": torch.float32},
        ),
        Case(
            "dreamzero 14b, indexed",
            {"B": 1, "S": 23, "L": 693, "D": 5120, "kind": "layer", "indexed": True},
        ),
        Case("wan 5b, per token", {"B": 2, "S": 1000, "L": 1, "D": 3072, "kind": "layer"}),
        Case("odd", {"B": 3, "S": 2, "L": 7, "D": 331, "kind": "rms"}),
    ),
)
