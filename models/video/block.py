"""One Wan DiT block, in the parts that the world-action models put together in their own ways.

    x += g_msa · o(attention(q, k, v)),   q, k = RoPE(RMSNorm(Wq h)), v = Wv h, h = LN(x)·(1 + s_msa) + b_msa
    x += o'(attention(q', k', v')),       q' from LN_affine(x), k', v' from the text
    x += g_mlp · W2 gelu(W1 (LN(x)·(1 + s_mlp) + b_mlp))

Order of the six modulations: b_msa, s_msa, g_msa, b_mlp, s_mlp, g_mlp = table + projected time. RMSNorm runs over all
heads together. Self attention is injected: the block gives q, k, v (`project`) and takes back the mixed values
(`finish`), so that experts can share one attention, caches can be filled and masks be structured. Official names.

Axes: B samples, S tokens, G groups of tokens that share a time, D width, H heads, K channels of a head, L text tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.models.blocks.attention import Attention
from vlaforge.models.blocks.modulation import GatedAdd, ModulatedLayerNorm
from vlaforge.models.blocks.norms import RMSNorm
from vlaforge.models.video.rope import PairRotary

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Six = tuple[Tensor, ...]
"""The six modulations of a block, fp32 [B, G, D] each."""


class Projections(nn.Module):
    """q, k, v, o of one attention with RMSNorm over the joint width of q and k.

    `dim` is the width of tokens and text, `heads`·`head_dim` that of the attention (they differ in FastWAM's action
    expert, which meets the video expert in one attention).
    """

    def __init__(self, dim: int, heads: int, head_dim: int, eps: float):
        super().__init__()
        inner = heads * head_dim
        self.heads, self.head_dim = heads, head_dim
        self.q, self.k, self.v = (nn.Linear(dim, inner) for _ in range(3))
        self.o = nn.Linear(inner, dim)
        self.norm_q, self.norm_k = RMSNorm(inner, eps), RMSNorm(inner, eps)
        self.attention = Attention()

    def query(self, x_BSD: Tensor) -> Tensor:
        return self._split(self.norm_q(self.q(x_BSD)))

    def key_value(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.norm_k(self.k(x_BLD))), self._split(self.v(x_BLD))

    def mix(self, q_BSHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor, bias: Tensor | None = None) -> Tensor:
        """Softmax attention without a mask; `bias` [1, 1, 1, L] is added to the scores."""
        q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BLHK, v_BLHK))
        if bias is not None:
            return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype)).transpose(1, 2)
        return self.attention(q, k, v).transpose(1, 2)

    def output(self, mixed_BSHK: Tensor) -> Tensor:
        return self.o(mixed_BSHK.flatten(2))

    def _split(self, x_BSE: Tensor) -> Tensor:
        return x_BSE.unflatten(-1, (self.heads, self.head_dim))


class WanBlock(nn.Module):
    """The block's weights and its two halves around self attention."""

    def __init__(self, dim: int, ffn_dim: int, heads: int, head_dim: int, eps: float = 1e-6):
        super().__init__()
        self.norm1 = ModulatedLayerNorm(dim, eps)
        self.self_attn = Projections(dim, heads, head_dim, eps)
        self.rotary = PairRotary()
        self.add_attn = GatedAdd()
        self.norm3 = nn.LayerNorm(dim, eps=eps)
        self.cross_attn = Projections(dim, heads, head_dim, eps)
        self.norm2 = ModulatedLayerNorm(dim, eps)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.add_ffn = GatedAdd()
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def modulations(self, time_BG6D: Tensor) -> Six:
        """Table + projected time: shift, scale, gate of the attention, then of the MLP."""
        return (self.modulation[:, None].float() + time_BG6D).unbind(2)

    def project(
        self, x_BSD: Tensor, six: Six, cos_SP: Tensor, sin_SP: Tensor, queries: slice | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens → q, k (rotated) and v, [B, S, H, K] each; with `queries`, q of those tokens alone."""
        shift, scale, *_ = six
        h_BSD = self.norm1(x_BSD, scale, shift)
        k, v = self.self_attn.key_value(h_BSD)
        k = self.rotary(k, cos_SP, sin_SP)
        if queries is not None:
            h_BSD, cos_SP, sin_SP = h_BSD[:, queries], cos_SP[queries], sin_SP[queries]
        return self.rotary(self.self_attn.query(h_BSD), cos_SP, sin_SP), k, v

    def finish(
        self,
        x_BSD: Tensor,
        mixed_BSHK: Tensor,
        six: Six,
        text_BLHK: tuple[Tensor, Tensor],
        text_bias: Tensor | None = None,
    ) -> Tensor:
        """Tokens and what self attention mixed for them → the block's output [B, S, D].

        `text_BLHK` are the text's (k, v) from `text`; `text_bias` [1, 1, 1, L] is added to its scores.
        """
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = six
        x_BSD = self.add_attn(x_BSD, self.self_attn.output(mixed_BSHK), gate)
        q = self.cross_attn.query(self.norm3(x_BSD))
        x_BSD = x_BSD + self.cross_attn.output(self.cross_attn.mix(q, *text_BLHK, text_bias))
        return self.add_ffn(x_BSD, self.ffn(self.norm2(x_BSD, scale_mlp, shift_mlp)), gate_mlp)

    def text(self, context_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """(k, v) [B, L, H, K] of the embedded text: constant over sampling steps."""
        return self.cross_attn.key_value(context_BLD)

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
