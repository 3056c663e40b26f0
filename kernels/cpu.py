"""Products and attention on a CPU, where the default kernels are not the fastest ones.

Products. PyTorch sends fp32 products to MKL, which runs AVX2 code on processors of other makers; oneDNN, in the same
build, runs AVX-512 there (2.2 times faster on an AMD EPYC of 2024). `gemm_nt` is that product, forward and backward,
for strided inputs, as an op that `torch.compile` takes as it is. `prefers_onednn()` measures once which one is faster.

On a CPU with AMX, fp32 products run on its tiles (`native/products.c`): 1.3 to 1.6 times as fast as MKL, which reaches
nine tenths of what the vector units can do. One thread of a Xeon of 2023, GFLOP/s, forward, input and weight gradient:
552 rows, 512 to 2048 columns 242, 228, 196 against 146, 145, 144; 144 rows, 384 to 1792 columns 210, 203, 196 against
142, 155, 143; from memory rather than cache 187, 185, 154 against 125, 147, 139. X-VLA's mid-size step: 1628 ms instead
of 1806. A neighbour on the same core slows tiles more (to a third) than vectors. In bf16 oneDNN uses tiles itself.

In bf16, torch gives products to oneDNN where the CPU has AVX-512 or better, and elsewhere to loops of its own: 1 to 20
GFLOP/s on an AMD EPYC of 2021 (AVX2), where fp32 products reach 90. There they are widened: fp32 products of bf16
values, rounded once, which is what bf16 instructions compute, too.

Weight gradients in bf16 on a CPU with AMX: oneDNN reads the transposed factor of gradᵀ · x half as fast as one that
lies as it is read, so it is transposed before, by `many.c`. One thread of a Xeon of 2023, ms: 552 rows, 1024 to 4096
columns 9.1 and 4.7; 1024 rows, 1152 to 4304 columns 17.0 and 10.8; nothing gained with thousands of rows.

Attention as two products around a softmax: all query heads that share keys in one product, softmax by ATen's row
kernel. For the lengths of a policy (up to about a thousand tokens) the scores of a sample fit the cache, and this takes
half to two thirds of the time of SDPA's blocked kernel. One opaque op, so that the compiler does not take the softmax
apart (its own loop for it is eight times slower). The probabilities are kept for the backward. In bf16, where there are
tiles, `native/attention.py` takes its place.

Axes: M rows, N columns of the result, K the summed axis; B samples, H query heads, G key heads, T queries, S keys, and
in attention N = B·G pairs, Q = T·H/G queries of a pair, K head width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.kernels.native import loops, products
from vlaforge.kernels.native.calls import op


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] · b [N, K]ᵀ. A `b` with gaps between its rows, such as a part of a packed product, is copied: with a
    gap oneDNN takes 84 ms for [704, 32] · [176, 32]ᵀ, without 0.2."""
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


# ---------------------------------------------------------------------------------------------------- products


_gemm = op("gemm_nt(Tensor a, Tensor b) -> Tensor", _onednn, lambda a, b: a.new_empty((a.shape[0], b.shape[0])))


class _GemmNT(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _gemm(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        da = _gemm(grad, b.t()) if ctx.needs_input_grad[0] else None
        db = _gemm(grad.t(), a.t()) if ctx.needs_input_grad[1] else None
        return da, db


def gemm_nt(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] · b [N, K]ᵀ → [M, N], fp32 on the CPU, any strides; differentiable."""
    return _GemmNT.apply(a, b)


MOST_ROWS, LEAST_COLUMNS = 2048, 512
"""Up to how many rows, and from how many columns of the wider side, a transposition pays."""


def _weight_gradient_cpu(grad_MN: Tensor, x_MK: Tensor) -> Tensor:
    wide = max(grad_MN.shape[1], x_MK.shape[1]) >= LEAST_COLUMNS
    native = loops()
    if native is None or grad_MN.dtype != torch.bfloat16 or not wide or len(grad_MN) > MOST_ROWS:
        return grad_MN.t() @ x_MK
    return native.transposed(grad_MN.contiguous()) @ x_MK


_weight_gradient = op(
    "weight_gradient(Tensor grad, Tensor x) -> Tensor",
    _weight_gradient_cpu,
    lambda grad, x: x.new_empty((grad.shape[1], x.shape[1])),
)


def _tile_product_cpu(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None) -> Tensor:
    native = loops()
    if native is not None and products.pays(a_MK.shape[0], b_KN.shape[1], a_MK.shape[1]):
        return products.product(native, a_MK, b_KN, bias_N)
    return a_MK @ b_KN if bias_N is None else torch.addmm(bias_N, a_MK, b_KN)


_tile_product = op(
    "tile_product(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    _tile_product_cpu,
    lambda a, b, bias: a.new_empty((a.shape[0], b.shape[1])),
)
PRODUCTS = (_gemm, _tile_product)
"""The ops of linear layers, for policies that keep their outputs (recompute)."""


class _Tiled(torch.autograd.Function):
    """`F.linear` of x [M, K] on a CPU with tiles: in fp32 all products by them, in bf16 the weight gradient by
    `weight_gradient`."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        if x_MK.dtype == torch.float32:
            return _tile_product(x_MK, weight_NK.t(), bias_N)
        return F.linear(x_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        wide = grad_MN.dtype == torch.float32
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx = dweight = None
        if need_x:
            dx = _tile_product(grad_MN, weight_NK, None) if wide else grad_MN @ weight_NK
        if need_weight and wide:
            dweight = _tile_product(grad_MN.t(), x_MK, None)
        elif need_weight:
            dweight = _weight_gradient(grad_MN, x_MK)
        return dx, dweight, grad_MN.sum(0) if need_bias else None


class _Widened(torch.autograd.Function):
    """`F.linear` of x [M, K] in bf16 by fp32 products; bf16 is what is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        bias_N = None if bias_N is None else bias_N.float()
        return F.linear(x_MK.float(), weight_NK.float(), bias_N).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        low, grad_MN = grad_MN.dtype, grad_MN.float()
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            (grad_MN @ weight_NK.float()).to(low) if need_x else None,
            (grad_MN.t() @ x_MK.float()).to(low) if need_weight else None,
            grad_MN.sum(0).to(low) if need_bias else None,
        )


@dataclass(frozen=True)
class Products:
    """What multiplies on a CPU.

    Args:
        onednn: fp32 products by `gemm_nt`. tiles: those of fp32 and bf16 on tiles. widened: those of bf16 in fp32.
    """

    onednn: bool = False
    tiles: bool = False
    widened: bool = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`; elsewhere than on a CPU, and in other dtypes than fp32 and bf16, as torch does it."""
        if x.dtype != weight.dtype or x.device.type not in ("cpu", "meta"):
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        if self.tiles and x.dtype in (torch.float32, torch.bfloat16):
            return _Tiled.apply(rows, weight, bias).unflatten(0, x.shape[:-1])
        if self.widened and x.dtype == torch.bfloat16:
            return _Widened.apply(rows, weight, bias).unflatten(0, x.shape[:-1])
        if not (self.onednn and x.dtype == torch.float32):
            return F.linear(x, weight, bias)
        y = gemm_nt(rows, weight).unflatten(0, x.shape[:-1])
        return y if bias is None else y + bias


def widens() -> bool:
    """Whether bf16 products are best done in fp32 here: torch would not give them to oneDNN."""
    return not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


# ---------------------------------------------------------------------------------------------------- attention

Product = Callable[[Tensor, Tensor], Tensor]
"""(a [.., M, K], b [.., N, K]) → a · bᵀ."""


def _bmm_nt(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b.transpose(1, 2))


def _mix(q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, p: Tensor, product: Product) -> Tensor:
    """Mixed values; the probabilities are written to `p`. `keys` is None when all are valid."""
    scores = product(q, k)
    if keys is not None:
        scores.masked_fill_(~keys.unsqueeze(-2), torch.finfo(scores.dtype).min)
    torch.softmax(scores, -1, out=p)
    return product(p, v.transpose(-1, -2))


def _unmix(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, product: Product) -> tuple[Tensor, ...]:
    """Gradients of q, k, v. Those of k and v sum many queries into few rows: transposed, they take half as long."""
    dv = product(grad.transpose(-1, -2), p.transpose(-1, -2)).transpose(-1, -2)
    ds = torch._softmax_backward_data(product(grad, v), p, -1, p.dtype)
    dk = product(q.transpose(-1, -2), ds.transpose(-1, -2)).transpose(-1, -2)
    return product(ds, k.transpose(-1, -2)), dk, dv


def _attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, onednn: bool
) -> tuple[Tensor, Tensor]:
    out, p = _attention_meta(q, k, v, keys, scale, onednn)
    q = q * scale
    keys = None if keys is None or bool(keys.all()) else keys
    if not (onednn and q.dtype == torch.float32):
        return _mix(q, k, v, keys, p, _bmm_nt), p
    for n in range(q.shape[0]):
        out[n] = _mix(q[n], k[n], v[n], None if keys is None else keys[n], p[n], _onednn)
    return out, p


def _attention_meta(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, onednn: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[1], k.shape[1])


def _attention_backward_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, scale: float, onednn: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scaled = q * scale
    if not (onednn and q.dtype == torch.float32):
        dq, dk, dv = _unmix(grad, scaled, k, v, p, _bmm_nt)
        return dq.mul_(scale), dk.contiguous(), dv.contiguous()
    dq, dk, dv = _attention_backward_meta(grad, q, k, v, p, scale, onednn)
    for n in range(q.shape[0]):
        dq[n], dk[n], dv[n] = _unmix(grad[n], scaled[n], k[n], v[n], p[n], _onednn)
    return dq.mul_(scale), dk, dv


def _attention_backward_meta(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, scale: float, onednn: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


ATTENTION = op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? keys, float scale, bool onednn) -> (Tensor, Tensor)",
    _attention_cpu,
    _attention_meta,
)
"""The op itself, for policies that keep its outputs (recompute)."""
_attention_backward = op(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor p, float scale, bool onednn)"
    " -> (Tensor, Tensor, Tensor)",
    _attention_backward_cpu,
    _attention_backward_meta,
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, onednn: bool) -> Tensor:
        out, p = ATTENTION(q, k, v, keys, scale, onednn)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.onednn = scale, onednn
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        return *_attention_backward(grad, q, k, v, p, ctx.scale, ctx.onednn), None, None, None


def attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, keys_BS: Tensor | None, scale: float, onednn: bool = False
) -> Tensor:
    """softmax(q kᵀ · scale) v → [B, H, T, K] over the keys that `keys_BS` (bool) marks; None marks all.

    The softmax is fp32 inside; in bf16 scores and probabilities are rounded to bf16, as in the published eager code. A
    sample without a valid key mixes all of them. `onednn` sends fp32 products to oneDNN.
    """
    b, h, t, width = q_BHTK.shape
    groups, s = k_BGSK.shape[1:3]
    repeat = h // groups
    # One product serves all query heads of a key head. [B, T, H, K] is how projections lie in memory, so with one key
    # head none of these reshapes copies.
    q_NQK = q_BHTK.unflatten(1, (groups, repeat)).permute(0, 1, 3, 2, 4).reshape(b * groups, t * repeat, width)
    k_NSK, v_NSK = k_BGSK.reshape(b * groups, s, width), v_BGSK.reshape(b * groups, s, width)
    keys_NS = None if keys_BS is None else keys_BS[:, None].expand(b, groups, s).reshape(b * groups, s)
    out_NQK = _Attention.apply(q_NQK, k_NSK, v_NSK, keys_NS, scale, onednn)
    return out_NQK.unflatten(1, (t, repeat)).unflatten(0, (b, groups)).permute(0, 1, 3, 2, 4).reshape(b, h, t, width)


# ---------------------------------------------------------------------------------------------------- choice


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN's fp32 product is at least 15 % faster here than the default one: measured once, in some 100 ms.

    The two take turns, and the best of many counts, so that a busy machine decides as an idle one: a run that resumes
    bit for bit must choose again what it chose. No generator is touched.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    a = torch.linspace(-1.0, 1.0, 512 * 512).view(512, 512)
    b = a.T.contiguous()
    try:
        ours, plain = _best((lambda: _onednn(a, b), lambda: a @ b.T))
    except RuntimeError:
        return False
    return plain > 1.15 * ours


def _best(runs: Sequence[Callable[[], Any]], times: int = 20) -> list[float]:
    """The least seconds of each, after one call that does not count."""
    best = [float("inf")] * len(runs)
    for turn in range(1 + times):
        for index, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if turn:
                best[index] = min(best[index], time.perf_counter() - began)
    return best
