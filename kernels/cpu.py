"""Matrix products on a CPU, where the default BLAS is not the fastest one.

PyTorch sends fp32 products to MKL, which runs AVX2 code on processors of other makers; oneDNN, in the same build, runs
AVX-512 there (2.2 times faster on an AMD EPYC of 2024). `gemm_nt` is that product, forward and backward, for strided
inputs, as an op that `torch.compile` takes as it is. `prefers_onednn()` measures once which one is faster here.

Attention on a CPU is done with matrix products: scores of all query heads that share keys in one product, an fp32
softmax that the compiler fuses with scale and mask, and a second product. For the lengths of a policy (up to about a
thousand tokens) the scores fit the cache, and this beats the blocked kernel of SDPA, above all under a mask.

Axes: M rows, N columns of the result, K the summed axis; B samples, H query heads, G key heads, T queries, S keys.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LIBRARY = torch.library.Library("vlaforge_cpu", "DEF")
_LIBRARY.define("gemm_nt(Tensor a, Tensor b) -> Tensor")


def _gemm_cpu(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == 2:
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return torch.stack([torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "") for x, y in zip(a, b)])


def _gemm_meta(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]))


_LIBRARY.impl("gemm_nt", _gemm_cpu, "CPU")
_LIBRARY.impl("gemm_nt", _gemm_meta, "Meta")
_op = torch.ops.vlaforge_cpu.gemm_nt.default


class _GemmNT(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _op(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        da = _op(grad, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        db = _op(grad.transpose(-1, -2), a.transpose(-1, -2)) if ctx.needs_input_grad[1] else None
        return da, db


def gemm_nt(a: Tensor, b: Tensor) -> Tensor:
    """a [.., M, K] · b [.., N, K]ᵀ → [.., M, N], fp32 on the CPU, two or three axes, any strides; differentiable."""
    return _GemmNT.apply(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with the product done by `gemm_nt` where it applies (fp32 on the CPU), else by torch."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or x.device.type not in ("cpu", "meta"):
        return F.linear(x, weight, bias)
    y = gemm_nt(x.reshape(-1, x.shape[-1]), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, keys_BS: Tensor | None, scale: float, onednn: bool = False
) -> Tensor:
    """softmax(q kᵀ · scale) v → [B, H, T, K] over the keys that `keys_BS` (bool) marks; None marks all.

    The softmax is fp32; bf16 products round to bf16, as in the published eager code. A sample without a valid key mixes
    all of them. `onednn` sends fp32 products of grouped queries (few and large) to `gemm_nt`.
    """
    b, h, t, width = q_BHTK.shape
    groups, s = k_BGSK.shape[1:3]
    repeat, dtype = h // groups, q_BHTK.dtype
    product = gemm_nt if onednn and dtype == torch.float32 and repeat > 1 else _bmm_nt
    # One product serves all query heads of a key head. [B, T, H, K] is how projections lie in memory, so with one key
    # head none of these reshapes copies.
    q_NQK = q_BHTK.unflatten(1, (groups, repeat)).permute(0, 1, 3, 2, 4).reshape(b * groups, t * repeat, width)
    k_NSK, v_NSK = k_BGSK.reshape(b * groups, s, width), v_BGSK.reshape(b * groups, s, width)
    scores_NQS = product(q_NQK, k_NSK).float() * scale
    if keys_BS is not None:
        bias_BS = torch.zeros_like(keys_BS, dtype=torch.float32).masked_fill(~keys_BS, torch.finfo(torch.float32).min)
        bias_NS = bias_BS[:, None].expand(b, groups, s).reshape(b * groups, s)
        scores_NQS = scores_NQS + bias_NS[:, None]
    mixed_NQS = scores_NQS.softmax(-1).to(dtype)
    out_NQK = product(mixed_NQS, v_NSK.transpose(1, 2))
    return out_NQK.unflatten(1, (t, repeat)).unflatten(0, (b, groups)).permute(0, 1, 3, 2, 4).reshape(b, h, t, width)


def _bmm_nt(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b.transpose(1, 2))


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN's fp32 product is at least 15 % faster here than the default one: measured once, in a few ms."""
    if not torch.backends.mkldnn.is_available():
        return False
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    try:
        ours = _best(lambda: _gemm_cpu(a, b))
    except RuntimeError:
        return False
    return _best(lambda: a @ b.T) > 1.15 * ours


def _best(run: Any, times: int = 5) -> float:
    run()
    best = float("inf")
    for _ in range(times):
        begun = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begun)
    return best
