"""q/k norm and rotary embedding in one pass.

    u = x · (mean(x²) + eps)^-½ · g,    y = turn(u) by the table (see `rotary`)

The mean runs over one head (weight [K]: Qwen3, Cosmos3) or over all heads of a token together (weight [H·K]: Wan).
`cast_first` rounds the normalised value before the weight, as in `rms_norm`. fp32 in between, rounded once at the end.

Backward, with x̂ = x · r, dz = dy turned back and h = dz · g:
    dx = r · (h - x̂ · mean(h · x̂)),  dg = Σ dz · x̂.

Axes: B samples, T tokens, H heads, K channels of a head, P = K/2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlaforge.kernels import rms_norm as rms
from vlaforge.kernels import rotary as rope
from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import (
    MAX_WIDTH,
    cdiv,
    launch,
    only_first_has_gradient,
    op,
    power_of_2,
    programs,
    side_by_side,
)
from vlaforge.kernels.pairs import load_pairs, load_table, store_pairs, turn
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch


def _one(x, weight, cos, sin, eps, layout, plus_one, cast_first) -> Tensor:
    whole = weight.shape[0] != x.shape[-1]
    normed = rms.reference(x.flatten(2) if whole else x, weight, eps=eps, plus_one=plus_one, cast_first=cast_first)
    return rope.reference(normed.view(x.shape), cos, sin, layout=layout)


def reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    layout: rope.Pairing = "half",
    plus_one: bool = False,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """The formula in plain torch: `rms_norm`, then `rotary` (rounded in between where the dtype is not fp32)."""
    options = (eps, layout, plus_one, cast_first)
    return _one(q, q_weight, cos, sin, *options), _one(k, k_weight, cos, sin, *options)


# ---- kernels


@triton.jit
def _place(program, n_places, n_tokens, n_heads, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """(sample, token, head, whether it exists) of each row: the heads of one token (WHOLE: sample and token are
    scalars then), or ROWS heads in order."""
    lane = tl.arange(0, ROWS)
    if WHOLE:
        place, head = program, lane
        row_ok = head < n_heads
    else:
        row = program * ROWS + lane
        place, head = row // n_heads, row % n_heads
        row_ok = place < n_places
    return (place // n_tokens).to(tl.int64), (place % n_tokens).to(tl.int64), head, row_ok


@triton.jit
def _heads(ptr, batch, token, head, stride_b, stride_t, stride_h, WHOLE: tl.constexpr):
    """(pointer, offset of each row): with one token a program, the 64-bit part is a scalar."""
    if WHOLE:
        ptr, at = ptr + (batch * stride_b + token * stride_t), head * stride_h
    else:
        at = batch * stride_b + token * stride_t + head * stride_h
    return ptr, at


@triton.jit
def _angles(
    cos_ptr, sin_ptr, batch, token, row_ok, n_pairs, table_b, table_t, PAIRS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """cos and sin of each row, [1, PAIRS] where all rows have the same."""
    at = batch * table_b + token * table_t
    if WHOLE:
        one = tl.arange(0, 1)
        return load_table(cos_ptr + at, sin_ptr + at, one, one == 0, n_pairs, PAIRS)
    else:
        return load_table(cos_ptr, sin_ptr, at, row_ok, n_pairs, PAIRS)


@triton.jit
def _mean(a, b, width, WHOLE: tl.constexpr):
    """Mean over each row's pairs, [ROWS], or over all rows together, a scalar."""
    total = tl.sum(a + b, axis=1)
    if WHOLE:
        total = tl.sum(total, axis=0)
    return total / width


@triton.jit
def _gain(
    weight_ptr, head, row_ok, n_pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
    INTERLEAVED: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        at = head * (2 * n_pairs)
    else:
        at = head * 0
    a, b = load_pairs(weight_ptr, at, row_ok, n_pairs, ROWS, PAIRS, INTERLEAVED)
    if PLUS_ONE:
        a += 1.0
        b += 1.0
    return a, b


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr, n_places, n_tokens, n_heads, n_pairs, width,
    x_b, x_t, x_h, y_b, y_t, y_h, table_b, table_t, eps,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PLUS_ONE: tl.constexpr, CAST_FIRST: tl.constexpr,
):  # fmt: skip
    batch, token, head, row_ok = _place(tl.program_id(0), n_places, n_tokens, n_heads, ROWS, WHOLE)
    x_ptr, at = _heads(x_ptr, batch, token, head, x_b, x_t, x_h, WHOLE)
    a, b = load_pairs(x_ptr, at, row_ok, n_pairs, ROWS, PAIRS, INTERLEAVED)
    rstd = tl.rsqrt(_mean(a * a, b * b, width, WHOLE) + tl.cast(eps, tl.float32))
    place = batch * n_tokens + token
    if WHOLE:
        tl.store(rstd_ptr + place, rstd)
    else:
        tl.store(rstd_ptr + place * n_heads + head, rstd, mask=row_ok)
        rstd = rstd[:, None]
    a, b = a * rstd, b * rstd
    if CAST_FIRST:
        a = a.to(y_ptr.dtype.element_ty).to(tl.float32)
        b = b.to(y_ptr.dtype.element_ty).to(tl.float32)
    ga, gb = _gain(weight_ptr, head, row_ok, n_pairs, ROWS, PAIRS, WHOLE, INTERLEAVED, PLUS_ONE)
    cos, sin = _angles(cos_ptr, sin_ptr, batch, token, row_ok, n_pairs, table_b, table_t, PAIRS, WHOLE)
    a, b = turn(a * ga, b * gb, cos, sin, False)
    y_ptr, at = _heads(y_ptr, batch, token, head, y_b, y_t, y_h, WHOLE)
    store_pairs(y_ptr, at, row_ok, n_pairs, a, b, ROWS, PAIRS, INTERLEAVED)


@triton.jit
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, partial_ptr,
    n_tiles, n_places, n_tokens, n_heads, n_pairs, width,
    dy_b, dy_t, dy_h, x_b, x_t, x_h, dx_b, dx_t, dx_h, table_b, table_t,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr, INTERLEAVED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Each program walks over every P-th tile and keeps its own sum of dz · x̂ for the weight."""
    program = tl.program_id(0)
    dga = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    dgb = tl.zeros([ROWS, PAIRS], dtype=tl.float32)
    for tile in range(program, n_tiles, tl.num_programs(0)):
        batch, token, head, row_ok = _place(tile, n_places, n_tokens, n_heads, ROWS, WHOLE)
        x_at_ptr, x_at = _heads(x_ptr, batch, token, head, x_b, x_t, x_h, WHOLE)
        dy_at_ptr, dy_at = _heads(dy_ptr, batch, token, head, dy_b, dy_t, dy_h, WHOLE)
        place = batch * n_tokens + token
        if WHOLE:
            rstd = tl.load(rstd_ptr + place)
        else:
            rstd = tl.load(rstd_ptr + place * n_heads + head, mask=row_ok, other=0.0)[:, None]
        a, b = load_pairs(x_at_ptr, x_at, row_ok, n_pairs, ROWS, PAIRS, INTERLEAVED)
        a, b = a * rstd, b * rstd
        da, db = load_pairs(dy_at_ptr, dy_at, row_ok, n_pairs, ROWS, PAIRS, INTERLEAVED)
        cos, sin = _angles(cos_ptr, sin_ptr, batch, token, row_ok, n_pairs, table_b, table_t, PAIRS, WHOLE)
        da, db = turn(da, db, cos, sin, True)
        if partial_ptr is not None:
            dga += da * a
            dgb += db * b
        ga, gb = _gain(weight_ptr, head, row_ok, n_pairs, ROWS, PAIRS, WHOLE, INTERLEAVED, PLUS_ONE)
        da, db = da * ga, db * gb
        mean = _mean(da * a, db * b, width, WHOLE)
        if not WHOLE:
            mean = mean[:, None]
        da, db = (da - a * mean) * rstd, (db - b * mean) * rstd
        dx_at_ptr, dx_at = _heads(dx_ptr, batch, token, head, dx_b, dx_t, dx_h, WHOLE)
        store_pairs(dx_at_ptr, dx_at, row_ok, n_pairs, da, db, ROWS, PAIRS, INTERLEAVED)
    if partial_ptr is None:
        pass
    elif WHOLE:
        lane = tl.arange(0, ROWS)
        partial_ptr += program.to(tl.int64) * width
        store_pairs(partial_ptr, lane * (2 * n_pairs), lane < n_heads, n_pairs, dga, dgb, ROWS, PAIRS, INTERLEAVED)
    else:
        one = tl.arange(0, 1)
        at = program.to(tl.int64) * width + one
        dga, dgb = tl.sum(dga, axis=0)[None, :], tl.sum(dgb, axis=0)[None, :]
        store_pairs(partial_ptr, at, one == 0, n_pairs, dga, dgb, 1, PAIRS, INTERLEAVED)


# ---- launchers and registration


def _tile(x: Tensor, whole: bool, backward: bool = False) -> tuple[int, int, int, int]:
    """(rows, pairs, warps, tiles) of a launch: 8 pairs a thread, 4 in an fp32 backward, which holds the most."""
    b, t, h, k = x.shape
    pairs = power_of_2(k // 2)
    rows = power_of_2(h) if whole else max(1, min(32, (512 if backward else 1024) // pairs))
    warps = rows * pairs // (128 if backward and x.element_size() == 4 else 256)
    warps = max(4, min(32, warps))
    return rows, pairs, warps, b * t if whole else cdiv(b * t * h, rows)


def _forward_fake(x, weight, cos, sin, eps, interleaved, plus_one, cast_first):
    b, t, h, k = x.shape
    stats = b * t if weight.shape[0] != k else b * t * h
    return torch.empty_like(side_by_side(x)), x.new_empty(stats, dtype=torch.float32)


@op("norm_rope", _forward_fake)
def _forward(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool, plus_one: bool, cast_first: bool
) -> tuple[Tensor, Tensor]:
    x, weight, (cos, sin) = side_by_side(x), weight.contiguous(), rope.strides_alike(cos, sin)
    (b, t, h, k), whole = x.shape, weight.shape[0] != x.shape[-1]
    y, rstd = _forward_fake(x, weight, cos, sin, eps, interleaved, plus_one, cast_first)
    rows, pairs, warps, tiles = _tile(x, whole)
    launch(
        _forward_kernel, (tiles,), x, weight, cos, sin, y, rstd, b * t, t, h, k // 2, weight.shape[0],
        *x.stride()[:3], *y.stride()[:3], cos.stride(0) if cos.ndim == 3 else 0, cos.stride(-2), eps,
        ROWS=rows, PAIRS=pairs, WHOLE=whole, INTERLEAVED=interleaved, PLUS_ONE=plus_one, CAST_FIRST=cast_first,
        num_warps=warps,
    )  # fmt: skip
    return y, rstd


def _backward_fake(dy, x, weight, cos, sin, rstd, interleaved, plus_one, weight_grad):
    return torch.empty_like(side_by_side(x)), weight.new_empty(weight.shape if weight_grad else 0)


@op("norm_rope_backward", _backward_fake)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rstd: Tensor, interleaved: bool, plus_one: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dy, x, (cos, sin) = side_by_side(dy), side_by_side(x), rope.strides_alike(cos, sin)
    weight = weight.contiguous()
    (b, t, h, k), whole = x.shape, weight.shape[0] != x.shape[-1]
    rows, pairs, warps, tiles = _tile(x, whole, backward=True)
    count = programs(tiles, x.device)
    dx = torch.empty_like(x)
    partial = x.new_empty((count, weight.shape[0]), dtype=torch.float32) if weight_grad else None
    launch(
        _backward_kernel, (count,), dy, x, weight, cos, sin, rstd, dx, partial, tiles, b * t, t, h, k // 2,
        weight.shape[0], *dy.stride()[:3], *x.stride()[:3], *dx.stride()[:3],
        cos.stride(0) if cos.ndim == 3 else 0, cos.stride(-2),
        ROWS=rows, PAIRS=pairs, WHOLE=whole, INTERLEAVED=interleaved, PLUS_ONE=plus_one, num_warps=warps,
    )  # fmt: skip
    return dx, weight.new_empty(0) if partial is None else partial.sum(0).to(weight.dtype)


def _save(ctx, inputs, output):
    x, weight, cos, sin, _, ctx.interleaved, ctx.plus_one, _ = inputs
    ctx.save_for_backward(x, weight, cos, sin, output[1])
    only_first_has_gradient(ctx, output)


def _gradients(ctx, dy, _):
    weight_grad = ctx.needs_input_grad[1]
    dx, dweight = _backward(dy, *ctx.saved_tensors, ctx.interleaved, ctx.plus_one, weight_grad)
    return dx, dweight if weight_grad else None, None, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, **_) -> Decision:
    """What `rotary` takes, and weights of one head or of all heads up to 8192 channels."""
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        if x.dtype not in FLOATS or weight.dtype not in FLOATS:
            return Decision(False, f"qk_norm_rope takes fp32, bf16 or fp16; {name} has {x.dtype}, {weight.dtype}")
        if weight.shape[0] != x.shape[-1] and power_of_2(x.shape[2]) * power_of_2(x.shape[3]) > MAX_WIDTH:
            return Decision(False, f"qk_norm_rope takes tokens of up to {MAX_WIDTH} channels, {name} has more")
        turned = rope.supports(x, cos, sin)
        if not turned:
            return turned
    return YES


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    layout: rope.Pairing = "half",
    plus_one: bool = False,
    cast_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm and rotary embedding of q [B, T, H, K] and k [B, T, H', K], any strides; dtypes as given.

    Args:
        q_weight, k_weight: [K] to norm each head alone, or [H·K] (H'·K) to norm all heads of a token together.
        cos, sin: [T, K/2] or [B, T, K/2].
        layout: which channels are a pair, see `rotary`.
        plus_one, cast_first: see `rms_norm`.

    Raises:
        ValueError: weights or a table of another shape.
    """
    for x, weight in ((q, q_weight), (k, k_weight)):
        rope.check_table(x, cos, sin)
        if tuple(weight.shape) not in ((x.shape[3],), (x.shape[2] * x.shape[3],)):
            raise ValueError(
                f"a norm weight for {list(x.shape)} has one head's or all channels, not {list(weight.shape)}"
            )
    if cos.ndim == 3 and cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    if not dispatch("qk_norm_rope", q, supports(q, k, q_weight, k_weight, cos, sin)):
        return reference(
            q, k, q_weight, k_weight, cos, sin, eps=eps, layout=layout, plus_one=plus_one, cast_first=cast_first
        )
    options = (eps, layout == "interleaved", plus_one, cast_first)
    return _forward(q, q_weight, cos, sin, *options)[0], _forward(k, k_weight, cos, sin, *options)[0]


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    b, t, h, kv, k = (case.sizes[axis] for axis in ("B", "T", "H", "KV", "K"))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    whole = case.sizes["whole"]
    angle = normal(t, k // 2) * 50
    return {
        "q": normal(b, t, h, k).to(dtype),
        "k": normal(b, t, kv, k).to(dtype),
        "q_weight": (1 + 0.2 * normal(h * k if whole else k)).to(dtype),
        "k_weight": (1 + 0.2 * normal(kv * k if whole else k)).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "layout": case.sizes["layout"],
        "cast_first": case.sizes.get("cast_first", False),
    }


KERNEL = KernelSpec(
    name="qk_norm_rope",
    formula="turn(rms_norm(q)), turn(rms_norm(k))",
    op=qk_norm_rope,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("q", "k", "q_weight", "k_weight"),
    caps={"B": 2, "T": 5},
    cases=(
        Case(
            "qwen3 2b, per head",
            {"B": 16, "T": 192, "H": 16, "KV": 8, "K": 128, "whole": False, "layout": "half", "cast_first": True},
        ),
        Case(
            "cosmos3 8b, per head",
            {"B": 2, "T": 4096, "H": 32, "KV": 8, "K": 128, "whole": False, "layout": "half", "cast_first": True},
        ),
        Case(
            "wan 5b, all heads",
            {
                "B": 8,
                "T": 1024,
                "H": 24,
                "KV": 24,
                "K": 128,
                "whole": True,
                "layout": "interleaved",
                "cast_first": True,
            },
        ),
        Case(
            "wan 14b, all heads",
            {"B": 1, "T": 15940, "H": 40, "KV": 40, "K": 128, "whole": True, "layout": "interleaved"},
        ),
        Case("odd", {"B": 3, "T": 7, "H": 5, "KV": 3, "K": 44, "whole": False, "layout": "half"}),
        Case("odd, all heads", {"B": 3, "T": 7, "H": 5, "KV": 3, "K": 44, "whole": True, "layout": "interleaved"}),
    ),
)
