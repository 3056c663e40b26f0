"""RMSNorm over the last axis.

    y = x · (mean(x²) + eps)^-½ · g,    g = weight, 1 + weight, or 1 without a weight

The statistic and the product are fp32 and rounded to x's dtype once (Gemma). With `cast_first` the normalised
value is rounded before it meets the weight (Qwen, Wan, T5): the same maths, one more rounding.

Backward, with x̂ = x · r and h = dy · g:  dx = r · (h - x̂ · mean(h · x̂)),  dg = Σ_rows dy · x̂.

Axes: N rows, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import MAX_WIDTH, cdiv, launch, only_first_has_gradient, op, programs, row_tile, rows_of
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
    cast_first: bool = False,
) -> Tensor:
    """The formula in plain torch."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if cast_first:
        wide = wide.to(x.dtype).float()
    if weight is not None:
        wide = wide * (weight.float() + 1.0 if plus_one else weight.float())
    return wide.to(x.dtype)


# ---- kernels


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, n_rows, n_cols, x_stride, eps,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PLUS_ONE: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, WIDTH)
    row_ok, col_ok = rows < n_rows, cols < n_cols
    keep = row_ok[:, None] & col_ok[None, :]
    at = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * x_stride + cols[None, :], mask=keep, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / n_cols + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)
    y = x * rstd[:, None]
    if CAST_FIRST:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        g = tl.load(weight_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
        if PLUS_ONE:
            g += 1.0
        y = y * g[None, :]
    tl.store(y_ptr + at * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, n_rows, n_cols, dy_stride, x_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Each program walks over every P-th tile of rows and keeps its own sum of dy · x̂ for the weight."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, WIDTH)
    col_ok = cols < n_cols
    if weight_ptr is not None:
        g = tl.load(weight_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
        if PLUS_ONE:
            g += 1.0
    dg = tl.zeros([WIDTH], dtype=tl.float32)
    for first in range(program * ROWS, n_rows, n_programs * ROWS):
        rows = first + tl.arange(0, ROWS)
        row_ok = rows < n_rows
        keep = row_ok[:, None] & col_ok[None, :]
        at = rows.to(tl.int64)[:, None]
        x = tl.load(x_ptr + at * x_stride + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at * dy_stride + cols[None, :], mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_ok, other=0.0)[:, None]
        unit = x * rstd
        if partial_ptr is not None:
            dg += tl.sum(dy * unit, axis=0)
        if weight_ptr is not None:
            dy = dy * g[None, :]
        mean = tl.sum(dy * unit, axis=1)[:, None] / n_cols
        dx = rstd * (dy - unit * mean)
        tl.store(dx_ptr + at * n_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=keep)
    if partial_ptr is not None:
        tl.store(partial_ptr + program.to(tl.int64) * n_cols + cols, dg, mask=col_ok)


# ---- launchers and registration


def _forward_fake(x, weight, eps, plus_one, cast_first):
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@op("rms_norm", _forward_fake)
def _forward(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool, cast_first: bool) -> tuple[Tensor, Tensor]:
    x_ND = rows_of(x)
    n, d = x_ND.shape
    y, rstd_N = x.new_empty(x.shape), x.new_empty(n, dtype=torch.float32)
    weight = weight if weight is None else weight.contiguous()
    tile = row_tile(d)
    launch(
        _forward_kernel, (cdiv(n, tile.rows),), x_ND, weight, y, rstd_N, n, d, x_ND.stride(0), eps,
        ROWS=tile.rows, WIDTH=tile.width, PLUS_ONE=plus_one, CAST_FIRST=cast_first, num_warps=tile.num_warps,
    )  # fmt: skip
    return y, rstd_N


def _backward_fake(dy, x, weight, rstd, plus_one, weight_grad):
    return x.new_empty(x.shape), weight.new_empty(weight.shape) if weight_grad else x.new_empty(0)


@op("rms_norm_backward", _backward_fake)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, plus_one: bool, weight_grad: bool
) -> tuple[Tensor, Tensor]:
    dy_ND, x_ND = rows_of(dy), rows_of(x)
    n, d = x_ND.shape
    tile = row_tile(d, backward=True)
    count = programs(cdiv(n, tile.rows), x.device)
    dx = x.new_empty(x.shape)
    partial = x.new_empty((count, d), dtype=torch.float32) if weight_grad else None
    weight = weight if weight is None else weight.contiguous()
    launch(
        _backward_kernel, (count,), dy_ND, x_ND, weight, rstd, dx, partial, n, d, dy_ND.stride(0),
        x_ND.stride(0), ROWS=tile.rows, WIDTH=tile.width, PLUS_ONE=plus_one, num_warps=tile.num_warps,
    )  # fmt: skip
    if not weight_grad:
        return dx, x.new_empty(0)
    return dx, partial.sum(0).to(weight.dtype)


def _save(ctx, inputs, output):
    x, weight, _, ctx.plus_one, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    only_first_has_gradient(ctx, output)


def _gradients(ctx, dy, _):
    x, weight, rstd = ctx.saved_tensors
    weight_grad = ctx.needs_input_grad[1]
    dx, dweight = _backward(dy, x, weight, rstd, ctx.plus_one, weight_grad)
    return dx, dweight if weight_grad else None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(x: Tensor, weight: Tensor | None = None, **_) -> Decision:
    """Rows up to 8192 channels, fp32 / bf16 / fp16."""
    if x.dtype not in FLOATS:
        return Decision(False, f"rms_norm takes fp32, bf16 or fp16, not {x.dtype}")
    if not 0 < x.shape[-1] <= MAX_WIDTH:
        return Decision(False, f"rms_norm takes rows of up to {MAX_WIDTH} channels, not {x.shape[-1]}")
    return YES


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    plus_one: bool = False,
    cast_first: bool = False,
) -> Tensor:
    """RMSNorm of `x` [..., D] over its last axis; `weight` [D] of any float dtype.

    Args:
        eps: added to the mean square.
        plus_one: the gain is 1 + weight (Gemma).
        cast_first: round to x's dtype before the weight (Qwen, Wan).
    """
    if dispatch("rms_norm", x, supports(x, weight)):
        return _forward(x, weight, eps, plus_one, cast_first)[0]
    return reference(x, weight, eps=eps, plus_one=plus_one, cast_first=cast_first)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    size = case.sizes
    x = torch.randn(size["B"], size["T"], size["D"], device=device, generator=generator).to(dtype)
    weight = torch.randn(size["D"], device=device, generator=generator) * 0.3
    options = {name: size[name] for name in ("plus_one", "cast_first") if name in size}
    return {"x": x, "weight": weight.to(size.get("weight", dtype)), **options}


KERNEL = KernelSpec(
    name="rms_norm",
    formula="x · rsqrt(mean(x²) + eps) · (weight | 1 + weight)",
    op=rms_norm,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("x", "weight"),
    caps={"B": 2, "T": 7},
    cases=(
        Case("pi05 language", {"B": 32, "T": 762, "D": 2048, "plus_one": True, "weight": torch.float32}),
        Case("pi05 expert", {"B": 32, "T": 50, "D": 1024, "plus_one": True}),
        Case("wan 5b q and k", {"B": 8, "T": 1024, "D": 3072, "cast_first": True}),
        Case("wan 14b q and k", {"B": 1, "T": 15940, "D": 5120, "cast_first": True}),
        Case("qwen3 q heads", {"B": 16, "T": 3072, "D": 128, "cast_first": True}),
        Case("odd", {"B": 3, "T": 37, "D": 331}),
    ),
)
