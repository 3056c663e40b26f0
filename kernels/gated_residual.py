"""Gated residual: a sublayer's output enters the stream through a gate.

    y = h + x · gate

The gate has one row a sample, a frame or a token (see `modulation`). fp32 inside, rounded once to h's dtype.

Backward:  dh = dy,  dx = dy · gate,  dgate = Σ_tokens dy · x.

Axes: B samples, T tokens, S segments, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import FLAT, cdiv, launch, op, power_of_2, side_by_side
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


def reference(h: Tensor, x: Tensor, gate: Tensor, *, index: Tensor | None = None) -> Tensor:
    """The formula in plain torch."""
    wide, gate = spread(tokens(x).float(), index, segments(gate, x, index is not None))
    return (h.float() + (wide * gate.float()).reshape(x.shape)).to(h.dtype)


# ---- kernels


@triton.jit
def _forward_kernel(
    h_ptr, x_ptr, gate_ptr, index_ptr, y_ptr, n_rows, n_tokens, run, n_cols, h_b, h_t, x_b, x_t, gate_b, gate_s,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    row_ok = rows < n_rows
    keep = row_ok[:, None] & (cols < n_cols)
    batch, token = (rows // n_tokens).to(tl.int64), rows % n_tokens
    segment = segment_of(token, row_ok, run, index_ptr)
    h = tl.load(h_ptr + (batch * h_b + token * h_t)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + (batch * x_b + token * x_t)[:, None] + cols, mask=keep, other=0.0).to(tl.float32)
    gate_at = (batch * gate_b + segment * gate_s)[:, None] + cols
    gate = tl.load(gate_ptr + gate_at, mask=keep, other=0.0).to(tl.float32)
    y = (h + x * gate).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * n_cols + cols, y, mask=keep)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, gate_ptr, starts_ptr, dx_ptr, dgate_ptr, n_segments, n_tokens, run, n_cols,
    dy_b, dy_t, x_b, x_t, gate_b, gate_s, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a (sample, segment), share of its tokens and block of channels: dx, and a sum for the gate."""
    pair, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, segment = (pair // n_segments).to(tl.int64), pair % n_segments
    first, last = segment_bounds(segment, run, starts_ptr)
    cols = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    col_ok = cols < n_cols
    gate = tl.load(gate_ptr + batch * gate_b + segment * gate_s + cols, mask=col_ok, other=0.0)
    gate = gate.to(tl.float32)[None, :]
    dgate = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(first + share * ROWS, last, shares * ROWS):
        token = start + tl.arange(0, ROWS)
        keep = (token < last)[:, None] & col_ok[None, :]
        wide = token.to(tl.int64)
        dy_at = (batch * dy_b + wide * dy_t)[:, None] + cols[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=keep, other=0.0).to(tl.float32)
        if dgate_ptr is not None:
            x_at = (batch * x_b + wide * x_t)[:, None] + cols[None, :]
            x = tl.load(x_ptr + x_at, mask=keep, other=0.0).to(tl.float32)
            dgate += tl.sum(dy * x, axis=0)
        dx_at = (batch * n_tokens + wide)[:, None] * n_cols + cols[None, :]
        tl.store(dx_ptr + dx_at, (dy * gate).to(dx_ptr.dtype.element_ty), mask=keep)
    if dgate_ptr is not None:
        out = (share.to(tl.int64) * tl.num_programs(0) + pair) * n_cols + cols
        tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=col_ok)


# ---- launchers and registration


def _tile(d: int) -> tuple[int, int]:
    """(rows, columns) of a program."""
    width = min(FLAT.width, power_of_2(d))
    return max(1, min(16, 2 * FLAT.width // width)), width


def _forward_fake(h, x, gate, index):
    return h.new_empty(h.shape)


@op("gated_residual", _forward_fake)
def _forward(h: Tensor, x: Tensor, gate: Tensor, index: Tensor | None) -> Tensor:
    h, x, gate = side_by_side(h), side_by_side(x), side_by_side(gate)
    (b, t, d), over = x.shape, Spread.of(x, gate, index)
    rows, width = _tile(d)
    y = h.new_empty(h.shape)
    launch(
        _forward_kernel, (cdiv(b * t, rows), cdiv(d, width)), h, x, gate, index, y, b * t, t, over.run, d,
        h.stride(0), h.stride(1), x.stride(0), x.stride(1), gate.stride(0), gate.stride(1),
        ROWS=rows, WIDTH=width, num_warps=FLAT.num_warps,
    )  # fmt: skip
    return y


def _backward_fake(dy, x, gate, index, gate_grad):
    return x.new_empty(x.shape), gate.new_empty(gate.shape if gate_grad else 0)


@op("gated_residual_backward", _backward_fake)
def _backward(
    dy: Tensor, x: Tensor, gate: Tensor, index: Tensor | None, gate_grad: bool
) -> tuple[Tensor, Tensor]:
    dy, x, gate = side_by_side(dy), side_by_side(x), side_by_side(gate)
    (b, t, d), over = x.shape, Spread.of(x, gate, index, backward=True)
    rows, width = _tile(d)
    shares = over.shares(rows, cdiv(d, width), x.device)
    dx, dgate = x.new_empty(x.shape), room_for_shares(shares, gate) if gate_grad else None
    launch(
        _backward_kernel, (b * over.segments, shares, cdiv(d, width)), dy, x, gate, over.starts, dx, dgate,
        over.segments, t, over.run, d, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), gate.stride(0),
        gate.stride(1), ROWS=rows, WIDTH=width, num_warps=FLAT.num_warps,
    )  # fmt: skip
    return dx, gate.new_empty(0) if dgate is None else add_shares(dgate, gate)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx, dy):
    x, gate, index = ctx.saved_tensors
    gate_grad = ctx.needs_input_grad[2]
    dx, dgate = _backward(dy, x, gate, index, gate_grad)
    return dy, dx, dgate if gate_grad else None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(h: Tensor, x: Tensor, gate: Tensor, **_) -> Decision:
    """fp32 / bf16 / fp16, h and x of the same shape."""
    for name, tensor in (("h", h), ("x", x), ("gate", gate)):
        if tensor.dtype not in FLOATS:
            return Decision(False, f"gated_residual takes fp32, bf16 or fp16, and {name} is {tensor.dtype}")
    if h.shape != x.shape:
        return Decision(False, f"gated_residual adds equal shapes, not {list(h.shape)} and {list(x.shape)}")
    return YES


def gated_residual(h: Tensor, x: Tensor, gate: Tensor, *, index: Tensor | None = None) -> Tensor:
    """``h + x · gate`` for h and x [B, ..., D], of h's dtype.

    Args:
        gate: [B, D], [B, 1, D], [B, S, D] with S dividing the tokens, or [B, T, D]; read in place by its strides.
        index: int32 or int64 [T], not decreasing: the segment of each token, where segments differ in length.

    Raises:
        ValueError: a gate that does not spread over x.
    """
    if not dispatch("gated_residual", x, supports(h, x, gate)):
        return reference(h, x, gate, index=index)
    gate_BSD = segments(gate, x, index is not None)
    return _forward(tokens(h), tokens(x), gate_BSD, index).reshape(h.shape)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    b, s, run, d = (case.sizes[axis] for axis in ("B", "S", "L", "D"))
    h, x = torch.randn(2, b, s * run, d, device=device, generator=generator).unbind()
    gate = torch.randn(b, s, 6 * d, device=device, generator=generator).chunk(6, dim=-1)[2]
    inputs = {"h": h.to(dtype), "x": x.to(dtype), "gate": gate.to(dtype)}
    if case.sizes.get("indexed"):
        inputs["index"] = torch.arange(s, device=device).repeat_interleave(run, output_size=s * run)
    return inputs


KERNEL = KernelSpec(
    name="gated_residual",
    formula="h + x · gate",
    op=gated_residual,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("h", "x", "gate"),
    caps={"B": 2, "S": 4, "L": 5},
    cases=(
        Case("pi05 expert, per sample", {"B": 32, "S": 1, "L": 50, "D": 1024}),
        Case("fastwam video, per frame", {"B": 16, "S": 3, "L": 98, "D": 3072}),
        Case("lingbot, indexed", {"B": 2, "S": 26, "L": 136, "D": 3072, "indexed": True}),
        Case("wan 14b, per token", {"B": 1, "S": 15940, "L": 1, "D": 5120}),
        Case("odd", {"B": 3, "S": 2, "L": 7, "D": 331}),
    ),
)
