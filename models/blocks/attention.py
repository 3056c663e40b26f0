"""Attention behind one function: structure of the mask in, mixed values out.

A mask is stated by its structure (which keys are valid, whether it is causal), never as a dense float matrix, so that
an executor can use it: PyTorch's SDPA here, others in `models.blocks.executors`, chosen by passes for each kind of
call. Prefix-LM masks, whose prefix never sees what follows, are not a mask at all here but two calls (see
`models.pi05`): the prefix over itself, the rest over everything.

Grouped-query attention never repeats keys: the R query heads that share one key head are laid out as R times as many
queries of that head, which every kernel can do.

Axes: B samples, H query heads, G key/value heads, R = H/G, T queries, S keys, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. Build it with the class methods.

    Args:
        keys_BS: True where a key is valid, for all queries of the sample; None: all are.
        is_causal: query t sees keys up to its own position; the last query stands at the last key.
        segments_BT: self-attention inside segments: a query sees the keys with its own number; a negative number is
            padding, which sees and shows nothing.
        bias_S: added to the scores of a key, for all queries and samples: log n for one key that stands for n. It comes
            without the others.
    """

    keys_BS: Tensor | None = None
    is_causal: bool = False
    segments_BT: Tensor | None = None
    bias_S: Tensor | None = None

    @classmethod
    def padding(cls, keys_BS: Tensor) -> Mask:
        """Every query sees the sample's valid keys. A sample without valid keys mixes to zeros."""
        return cls(keys_BS)

    @classmethod
    def causal(cls) -> Mask:
        return cls(None, True)

    @classmethod
    def causal_padding(cls, keys_BS: Tensor) -> Mask:
        """Causal, and only valid keys. Queries at padded positions may see nothing and mix to zeros."""
        return cls(keys_BS, True)

    @classmethod
    def segments(cls, segments_BT: Tensor) -> Mask:
        """Blocks of a block table: tokens see the tokens of their own segment (windows, packed samples)."""
        return cls(segments_BT=segments_BT)

    @classmethod
    def weighted(cls, bias_S: Tensor) -> Mask:
        """All keys are seen, some more than others."""
        return cls(bias_S=bias_S)

    def dense(self, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
        """bool [B or 1, 1, T or 1, S], True where a query sees a key; T is 1 when all queries see the same."""
        if self.segments_BT is not None:
            own_BTS = self.segments_BT[:, :, None] == self.segments_BT[:, None, :]
            return (own_BTS & (self.segments_BT >= 0)[:, None, :])[:, None]
        device = device if self.keys_BS is None else self.keys_BS.device
        allowed = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
        if self.is_causal:
            allowed = allowed.expand(1, 1, queries, keys).tril(keys - queries)
        return allowed if self.keys_BS is None else allowed & self.keys_BS[:, None, None]


Executor = Callable[[Tensor, Tensor, Tensor, "Mask | None"], Tensor]


def attention(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q kᵀ · scale) v → [B, H, T, K] in q's dtype; the softmax is fp32 inside.

    Args:
        mask: None: every query sees every key.
        scale: None: K^-0.5.
    """
    b, h, t, _ = q_BHTK.shape
    groups, keys = k_BGSK.shape[1:3]
    if mask is not None and mask.bias_S is not None:
        bias = mask.bias_S.to(q_BHTK.dtype).view(1, 1, 1, keys)
        return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, bias, scale=scale, enable_gqa=h > groups)
    repeat = h // groups
    structured = mask is not None and (mask.keys_BS is not None or mask.segments_BT is not None)
    plain = not structured and (mask is None or not mask.is_causal or t == keys)
    causal = mask is not None and mask.is_causal
    if repeat == 1 or (plain and (causal or groups > 1)):
        allowed = None if plain else mask.dense(t, keys, q_BHTK.device)
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, allowed, is_causal=plain and causal, scale=scale, enable_gqa=repeat > 1
        )
    # [B, T, H, K] is how projections lie in memory, so with one key head neither reshape copies.
    q_BGQK = q_BHTK.unflatten(1, (groups, repeat)).permute(0, 1, 3, 2, 4).reshape(b, groups, t * repeat, -1)
    allowed = None if plain else mask.dense(t, keys, q_BHTK.device)
    if allowed is not None and allowed.shape[2] > 1:
        allowed = allowed.repeat_interleave(repeat, dim=2)
    out_BGQK = F.scaled_dot_product_attention(q_BGQK, k_BGSK, v_BGSK, allowed, scale=scale)
    return out_BGQK.unflatten(2, (t, repeat)).permute(0, 1, 3, 2, 4).reshape(b, h, t, -1)


class Attention(nn.Module):
    """`attention` as a module, with an executor for each kind of mask, so that passes can put others in their place.

    Executors are called as ``executor(q, k, v, mask)``: `plain` for no mask or a causal one, `structured` for a mask
    that SDPA can only take as one bool a (query, key) pair. Padded keys are one bool a key and stay with SDPA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain: Executor = attention
        self.structured: Executor = attention

    def forward(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask | None = None) -> Tensor:
        if mask is None or (mask.keys_BS is None and mask.segments_BT is None and mask.bias_S is None):
            return self.plain(q_BHTK, k_BGSK, v_BGSK, mask)
        if mask.is_causal or mask.segments_BT is not None:
            return self.structured(q_BHTK, k_BGSK, v_BGSK, mask)
        return attention(q_BHTK, k_BGSK, v_BGSK, mask)


class QKV(nn.Module):
    """Query, key and value projections of one input, as heads; one module, so that their weights can be packed.

    Args:
        width: of the input. heads, kv_heads, head_dim: H, G, K. bias: on all three.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, K], k and v [B, G, T, K]."""
        return self.heads(self.q_proj(x_BTD)), *self.keys(x_BTD)

    def keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """k and v alone, for inputs that nobody queries from."""
        return self.heads(self.k_proj(x_BTD)), self.heads(self.v_proj(x_BTD))

    def heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def merge_heads(x_BHTK: Tensor) -> Tensor:
    """[B, H, T, K] → [B, T, H·K]."""
    return x_BHTK.transpose(1, 2).flatten(2)
