"""One Wan DiT block, in the parts that the world-action models put together in their own ways.

    x += g_msa · o(attention(q, k, v)),   q, k = RoPE(RMSNorm(Wq h)), v = Wv h, h = LN(x)·(1 + s_msa) + b_msa
    x += o'(attention(q', k', v')),       q' from LN_affine(x), k', v' from the text
    x += g_mlp · W2 gelu(W1 (LN(x)·(1 + s_mlp) + b_mlp))

Order of the six modulations: b_msa, s_msa, g_msa, b_mlp, s_mlp, g_mlp = table + projected time. RMSNorm runs over all
heads together. Self attention is injected: the block gives q, k, v (`project`) and takes back the mixed values
(`finish`), so that experts can share one attention, caches can be filled and masks be structured. Official names.

Axes: B samples, S tokens, G groups of tokens that share a time, D width, H heads, K channels of a head, E = H·K,
L text tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vlaforge.models.blocks.attention import QKV, Attention, Mask
from vlaforge.models.blocks.modulation import GatedAdd, ModulatedLayerNorm
from vlaforge.models.blocks.norms import NormWeight, RMSNorm
from vlaforge.models.video.rope import QKNormRotary

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Six = tuple[Tensor, ...]
"""The six modulations of a block, fp32 [B, G, D] each."""


def mix(q_BSHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor, attention: Attention, bias_L: Tensor | None = None) -> Tensor:
    """Softmax attention of [B, S, H, K] tensors without a mask; `bias_L` is added to the scores."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BLHK, v_BLHK))
    return attention(q, k, v, None if bias_L is None else Mask.weighted(bias_L)).transpose(1, 2)


class SelfAttention(nn.Module):
    """Projections of self attention, with RMSNorm over the joint width of q and k, and rotary positions.

    `dim` is the width of the tokens, `heads`·`head_dim` that of the attention (they differ in FastWAM's action expert,
    which meets the video expert in one attention).
    """

    def __init__(self, dim: int, heads: int, head_dim: int, eps: float):
        super().__init__()
        inner = heads * head_dim
        self.qkv = QKV(dim, heads, heads, head_dim, bias=True)
        self.norm_q, self.norm_k = NormWeight(inner), NormWeight(inner)
        self.norm_rotary = QKNormRotary(eps)
        self.attention = Attention()
        self.o = nn.Linear(inner, dim)

    def forward(self, h_BSD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (normed and rotated) and v, [B, S, H, K] each."""
        q, k, v = (x.transpose(1, 2) for x in self.qkv(h_BSD))
        q, k = self.norm_rotary(q, k, self.norm_q.weight, self.norm_k.weight, cos_SP, sin_SP)
        return q, k, v

    def mix(self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
        return mix(q_BSHK, k_BSHK, v_BSHK, self.attention)


class CrossAttention(nn.Module):
    """Attention of tokens to the text, both `dim` wide; RMSNorm over the joint width of q and k."""

    def __init__(self, dim: int, heads: int, head_dim: int, eps: float):
        super().__init__()
        inner = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.q, self.k, self.v = (nn.Linear(dim, inner) for _ in range(3))
        self.norm_q, self.norm_k = RMSNorm(inner, eps), RMSNorm(inner, eps)
        self.attention = Attention()
        self.o = nn.Linear(inner, dim)

    def forward(self, x_BSD: Tensor, text_BLHK: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
        """Tokens [B, S, D] and the text's (k, v) → [B, S, D]."""
        q = self._split(self.norm_q(self.q(x_BSD)))
        return self.o(mix(q, *text_BLHK, self.attention, bias).flatten(2))

    def keys(self, text_BLD: Tensor, k_BLE: Tensor | None = None, v_BLE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(k, v) [B, L, H, K] of the embedded text; `k_BLE` and `v_BLE` are its projections where they are there
        already."""
        if k_BLE is None or v_BLE is None:
            k_BLE, v_BLE = self.k(text_BLD), self.v(text_BLD)
        return self._split(self.norm_k(k_BLE)), self._split(v_BLE)

    def _split(self, x_BSE: Tensor) -> Tensor:
        return x_BSE.unflatten(-1, (self.heads, self.head_dim))


class WanBlock(nn.Module):
    """The block's weights and its two halves around self attention."""

    def __init__(self, dim: int, ffn_dim: int, heads: int, head_dim: int, eps: float = 1e-6):
        super().__init__()
        self.norm1 = ModulatedLayerNorm(dim, eps)
        self.self_attn = SelfAttention(dim, heads, head_dim, eps)
        self.add_attn = GatedAdd()
        self.norm3 = nn.LayerNorm(dim, eps=eps)
        self.cross_attn = CrossAttention(dim, heads, head_dim, eps)
        self.norm2 = ModulatedLayerNorm(dim, eps)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.add_ffn = GatedAdd()
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def modulations(self, time_BG6D: Tensor) -> Six:
        """Table + projected time: shift, scale, gate of the attention, then of the MLP."""
        return (self.modulation[:, None].float() + time_BG6D).unbind(2)

    def project(self, x_BSD: Tensor, six: Six, cos_SP: Tensor, sin_SP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens → q, k (rotated) and v, [B, S, H, K] each."""
        shift, scale, *_ = six
        return self.self_attn(self.norm1(x_BSD, scale, shift), cos_SP, sin_SP)

    def finish(
        self,
        x_BSD: Tensor,
        mixed_BSHK: Tensor,
        six: Six,
        text_BLHK: tuple[Tensor, Tensor],
        text_bias: Tensor | None = None,
    ) -> Tensor:
        """Tokens and what self attention mixed for them → the block's output [B, S, D].

        `text_BLHK` are the text's (k, v) from `text`; `text_bias` [L] is added to its scores.
        """
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = six
        x_BSD = self.add_attn(x_BSD, self.self_attn.o(mixed_BSHK.flatten(2)), gate)
        x_BSD = x_BSD + self.cross_attn(self.norm3(x_BSD), text_BLHK, text_bias)
        return self.add_ffn(x_BSD, self.ffn(self.norm2(x_BSD, scale_mlp, shift_mlp)), gate_mlp)

    def text(self, context_BLD: Tensor, *projections: Tensor | None) -> tuple[Tensor, Tensor]:
        """(k, v) [B, L, H, K] of the embedded text: constant over sampling steps. `projections`: as for `keys`."""
        return self.cross_attn.keys(context_BLD, *projections)

    def forward(
        self,
        x_BSD: Tensor,
        time_BG6D: Tensor,
        context_BLD: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        attend: Attend | None = None,
    ) -> Tensor:
        """The whole block for a model of one tower; `attend` is its self attention (default: everything sees all)."""
        six = self.modulations(time_BG6D)
        q, k, v = self.project(x_BSD, six, cos_SP, sin_SP)
        mixed = (attend or self.self_attn.mix)(q, k, v)
        return self.finish(x_BSD, mixed, six, self.text(context_BLD))
