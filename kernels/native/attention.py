"""Attention in bf16 on a CPU with AMX tiles, forward and backward: `attention.c`, and the torch ops around it.

A sample's key head and the query heads that read it are one problem, done by one thread out of its second cache: K and
V are packed into tiles once, scores and their softmax are fp32, and probabilities are rounded to bf16 for the products
alone. Kept for the backward are only the log-sum-exps (fp32, one a query); it computes the probabilities again. Heads
are read where they lie, in [B, T, H, K] projections or parts of a packed one, and all outputs are written as
[B, T, H, K] memory, so that neither splitting nor merging heads copies. Any width and length is padded inside.

Against fp64 the errors of outputs and gradients are 2e-3 of their norm, which is the rounding of bf16, rather than the
5e-3 to 8e-3 of two products around a softmax whose scores are rounded, too. Results do not depend on threads.

One thread of a Xeon of 2023 (AMX), shared with neighbours, best of 25 in turns, forward + backward in ms, beside two
products around a softmax (`kernels.cpu`) and SDPA, whose blocked backward in bf16 does not use the tiles:

    samples, heads   T x S x K             here          products      SDPA
    32, 4            144 x 144 x 32        2.3 +  4.1     7.2 +  9.3    4.2 +  62
    2, 8             276 x 276 x 64        1.1 +  2.1     3.4 +  4.0    1.9 +  12
    2, 8             114 x 114 x 64        0.3 +  0.5     1.0 +  1.3    0.6 +   7
    2, 8             72 x 72 x 128         0.3 +  0.5     0.8 +  1.3    0.5 +   5
    4, 16            256 x 256 x 72        5.4 + 11.4    10.3 + 14.7    7.4 +  41
    2, 8 on one      600 x 600 x 256       7.7 + 22      15.4 + 28.5   12.8 + 106
    2, 8 on one      50 x 800 x 256        1.0 +  3.2     1.9 +  3.4    3.0 +  16

Training steps of the `midsize` presets (batch 2, compiled, the two sides in turns on the same busy machine, best and
median): FastWAM as shipped 118, 126 to 106, 113 ms; pi05 tight 805, 938 to 715, 888; X-VLA as shipped, best under a
profiler, 944 to 813.

Axes: B samples, H query heads, G key heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlaforge.kernels.native import needed
from vlaforge.kernels.native.calls import call, op, threads


def serves(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> bool:
    """Whether `attention` takes these: bf16, the values of a head side by side. (DaViT's channel attention has its few
    channels side by side and its width across memory: two products do that better.)"""
    given = (q_BHTK, k_BGSK, v_BGSK)
    return all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in given)


def _run(
    tensors: list[Tensor | None],
    lse: Tensor,
    keys: Tensor | None,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    backwards: bool,
) -> None:
    """`tensors`: q, k, v, output, its gradient, and the gradients of q, k, v, each [B, heads, tokens, K]."""
    library = needed().library
    q, k = tensors[0], tensors[1]
    keys = None if keys is None else keys.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    if not (q.numel() and k.numel()):
        for out in (tensors[3], *tensors[5:]):
            if out is not None:
                out.zero_()
        return
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], int(causal))
    strides = [n for x in tensors for n in ((0, 0, 0) if x is None else x.stride()[:3])]
    memory = torch.empty(call(library.vlaforge_attention_room, sizes, backwards, threads()), dtype=torch.uint8)
    given = (sizes, tensors, strides, keys, bias, lse, float(scale), backwards, threads(), memory)
    call(library.vlaforge_attention, *given)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_BHTK(x: Tensor) -> Tensor:
    """As `x`, in [B, T, H, K] memory."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


Keys = Tensor | None


def _forward_meta(
    q: Tensor, k: Tensor, v: Tensor, keys: Keys, bias: Keys, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    return _empty_BHTK(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, keys: Keys, bias: Keys, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = _forward_meta(q, k, v, keys, bias, scale, causal)
    given = [_side_by_side(x) for x in (q, k, v)]
    _run([*given, out, None, None, None, None], lse, keys, bias, scale, causal, False)
    return out, lse


def _backward_meta(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, keys: Keys, bias: Keys, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_BHTK(q), _empty_BHTK(k), _empty_BHTK(v)


def _backward_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, keys: Keys, bias: Keys, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _backward_meta(grad, q, k, v, lse, keys, bias, scale, causal)
    given = [_side_by_side(x) for x in (q, k, v)]
    _run([*given, None, _side_by_side(grad), *grads], lse, keys, bias, scale, causal, True)
    return grads


ATTENTION = op(
    "tiled_attention(Tensor q, Tensor k, Tensor v, Tensor? keys, Tensor? bias, float scale, bool causal)"
    " -> (Tensor, Tensor)",
    _forward_cpu,
    _forward_meta,
)
"""The op itself, for policies that keep its outputs (recompute)."""
_backward = op(
    "tiled_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor? keys, Tensor? bias,"
    " float scale, bool causal) -> (Tensor, Tensor, Tensor)",
    _backward_cpu,
    _backward_meta,
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Keys, bias: Keys, scale: float, causal: bool
    ) -> Tensor:
        out, lse = ATTENTION(q, k, v, keys, bias, scale, causal)
        ctx.save_for_backward(q, k, v, lse, keys, bias)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, keys, bias = ctx.saved_tensors
        return *_backward(grad, *saved, keys, bias, ctx.scale, ctx.causal), None, None, None, None


def attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    keys_BS: Tensor | None,
    bias_S: Tensor | None,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v → bf16 [B, H, T, K], in [B, T, H, K] memory; differentiable in q, k and v.

    Args:
        keys_BS: bool, which keys are seen; None: all. A sample without any mixes all of them alike, and where `causal`
            its queries, as any that see nothing, mix to zeros.
        bias_S: added to the scores of a key; has no gradient.
        causal: query t sees keys up to t + S - T.
    """
    return _Attention.apply(q_BHTK, k_BGSK, v_BGSK, keys_BS, bias_S, scale, causal)
