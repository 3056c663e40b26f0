"""GR00T's diffusion transformer: blocks that attend by turns to the context (text or image tokens) and to their own
tokens, modulated by the flow-matching time; and the self-attention blocks over the context before it (N1.7).

Facts: NVIDIA/Isaac-GR00T ``dit.py``; diffusers' ``Timesteps``, ``TimestepEmbedding``, ``FeedForward``.

Axes: B samples, T tokens [state; actions], D width of the DiT; M context tokens of width C, N of one kind; K width of
a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.data.ranges import ranged
from vlaforge.models.blocks.ahead import KeysValues, LayerConditions, LayerKeys
from vlaforge.models.blocks.attention import Attention, Mask
from vlaforge.models.blocks.dropout import Dropout
from vlaforge.models.blocks.modulation import ModulatedLayerNorm


@dataclass(frozen=True)
class DiTConfig:
    """`output` is the width that the decoder reads; `text_every`: of the cross-attention blocks, each
    `text_every`-th sees the text tokens and the others the image tokens (None: all see everything, unmasked)."""

    layers: int = 32
    heads: int = 32
    head_dim: int = 48
    output: int = 1024
    context: int = 2048
    text_every: int | None = 2
    dropout: float = 0.2

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class ContextConfig:
    """The self-attention over the context before the DiT (N1.7); 0 layers: none."""

    layers: int = ranged(4, low=0, high=1000)
    heads: int = 32
    head_dim: int = 64
    dropout: float = 0.2


class FeedForward(nn.Module):
    """Linear, GELU (tanh), dropout, Linear, dropout; four times as wide inside."""

    def __init__(self, width: int, dropout: float, salts: Iterator[int]):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(4 * width, width)
        self.drop1 = Dropout(dropout, next(salts))
        self.drop2 = Dropout(dropout, next(salts))

    def forward(self, x_BTD: Tensor, seed_B: Tensor | None) -> Tensor:
        hidden = self.drop1(self.act(self.fc1(x_BTD)), seed_B)
        return self.drop2(self.fc2(hidden), seed_B)


class HeadAttention(nn.Module):
    """Multi-head attention with biases; keys and values may be given, made from another sequence of width `context`."""

    def __init__(self, width: int, context: int, heads: int, dropout: float, salts: Iterator[int]):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(context, width)
        self.v_proj = nn.Linear(context, width)
        self.o_proj = nn.Linear(width, width)
        self.attention = Attention()
        # The published block drops twice here: in the attention's output layer and after it.
        self.drop1 = Dropout(dropout, next(salts))
        self.drop2 = Dropout(dropout, next(salts))

    def split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, context_BMC: Tensor) -> KeysValues:
        """(k, v), each [B, M, D]: a function of the context alone, so made once for all sampling steps."""
        return self.k_proj(context_BMC), self.v_proj(context_BMC)

    def forward(self, x_BTD: Tensor, k_BMD: Tensor, v_BMD: Tensor, mask: Mask | None, seed_B: Tensor | None) -> Tensor:
        mixed = self.attention(self.split(self.q_proj(x_BTD)), self.split(k_BMD), self.split(v_BMD), mask)
        out_BTD = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return self.drop2(self.drop1(out_BTD, seed_B), seed_B)


class ContextBlock(nn.Module):
    """Pre-norm self-attention block over the context, without any mask (padding rows take part, as published)."""

    def __init__(self, width: int, config: ContextConfig, salts: Iterator[int]):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = HeadAttention(width, width, config.heads, config.dropout, salts)
        self.norm2 = nn.LayerNorm(width)
        self.ff = FeedForward(width, config.dropout, salts)

    def forward(self, x_BMC: Tensor, mask: Mask | None, seed_B: Tensor | None) -> Tensor:
        normed = self.norm1(x_BMC)
        x_BMC = x_BMC + self.attn(normed, *self.attn.keys_values(normed), mask, seed_B)
        return x_BMC + self.ff(self.norm2(x_BMC), seed_B)


class DiTBlock(nn.Module):
    """AdaLN attention and a plain-LN MLP. With a context it attends to that alone, else to its own tokens."""

    def __init__(self, config: DiTConfig, cross: bool, salts: Iterator[int]):
        super().__init__()
        width = config.width
        self.cross = cross
        self.norm1 = ModulatedLayerNorm(width, eps=1e-5)
        self.modulation = nn.Linear(width, 2 * width)  # scale, then shift
        context = config.context if cross else width
        self.attn = HeadAttention(width, context, config.heads, config.dropout, salts)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-5)
        self.ff = FeedForward(width, config.dropout, salts)

    def forward(
        self,
        x_BTD: Tensor,
        time_BD: Tensor,
        context_BMC: Tensor | None,
        k_BMD: Tensor | None,
        v_BMD: Tensor | None,
        mask: Mask | None,
        seed_B: Tensor | None,
    ) -> Tensor:
        """`time_BD` is SiLU of the time embedding. `context` is what a cross-attention block reads, `k` and `v` what
        `attn.keys_values` makes of it, where they are there already."""
        scale_B1D, shift_B1D = self.modulation(time_BD)[:, None].chunk(2, dim=-1)
        normed = self.norm1(x_BTD, scale_B1D, shift_B1D)
        if k_BMD is None or v_BMD is None:
            k_BMD, v_BMD = self.attn.keys_values(normed if context_BMC is None else context_BMC)
        x_BTD = x_BTD + self.attn(normed, k_BMD, v_BMD, mask, seed_B)
        return x_BTD + self.ff(self.norm2(x_BTD), seed_B)


class DiT(nn.Module):
    """Even blocks attend to the context (text or image tokens by turns), odd ones to [state; actions]."""

    def __init__(self, config: DiTConfig, salts: Iterator[int]):
        super().__init__()
        self.config = config
        width = config.width
        self.time_fc1 = nn.Linear(256, width)
        self.time_fc2 = nn.Linear(width, width)
        self.blocks = nn.ModuleList(DiTBlock(config, i % 2 == 0, salts) for i in range(config.layers))
        self.norm_out = ModulatedLayerNorm(width, eps=1e-6)
        self.modulation_out = nn.Linear(width, 2 * width)  # shift, then scale: the other way round than in the blocks
        self.proj_out = nn.Linear(width, config.output)
        modulations = [[f"blocks.{i}.modulation"] for i in range(config.layers)]
        self.conditions = LayerConditions([*modulations, ["modulation_out"]])
        self.text_keys, self.image_keys = (
            LayerKeys([[f"blocks.{i}.attn.{n}_proj" for n in "kv"] for i in self.readers(text)])
            for text in (True, False)
        )

    def time(self, bucket_B: Tensor) -> Tensor:
        """The time embedding [B, D] of integer buckets (as floats)."""
        waves = bucket_waves(bucket_B, 256, shift=1.0, cos_first=True).to(self.time_fc1.weight.dtype)
        return self.time_fc2(F.silu(self.time_fc1(waves)))

    def readers(self, text: bool) -> list[int]:
        """The cross-attention blocks that read text, or the others: image tokens, or all in a plain DiT."""
        return [i for i in range(0, self.config.layers, 2) if self.reads_text(i) == text]

    def reads_text(self, index: int) -> bool:
        every = self.config.text_every
        return every is not None and index % (2 * every) == 0

    def keys_values(self, context: Context, ahead: bool = False) -> list[KeysValues | None]:
        """Keys and values of every cross-attention block, None for the others. Without `ahead` also None for those that
        make their own when they come to it: a block's weights may be at hand only then."""
        found: list[KeysValues | None] = [None] * len(self.blocks)
        for text, keys in ((True, self.text_keys), (False, self.image_keys)):
            part_BMC = context.part(self.config.text_every, text)
            for i, given in zip(self.readers(text), keys(part_BMC)):
                found[i] = self.blocks[i].attn.keys_values(part_BMC) if given is None and ahead else given
        return found

    def forward(self, x_BTD, bucket_B, keys_values, context: Context, seed_B=None) -> Tensor:
        """[B, T, D] and the `keys_values` of `context` → [B, T, output]."""
        *conditions, last_BD = self.conditions(F.silu(self.time(bucket_B)))
        for i, (block, condition_BD, given) in enumerate(zip(self.blocks, conditions, keys_values)):
            part_BMC = mask = None
            if block.cross:
                part_BMC = context.part(self.config.text_every, self.reads_text(i))
                mask = context.mask(self.config.text_every, self.reads_text(i))
            x_BTD = block(x_BTD, condition_BD, part_BMC, *(given or (None, None)), mask, seed_B)
        shift_B1D, scale_B1D = self.modulation_out(last_BD)[:, None].chunk(2, dim=-1)
        return self.proj_out(self.norm_out(x_BTD, scale_B1D, shift_B1D))


@dataclass(frozen=True)
class Context:
    """What the DiT reads: encoded tokens, which of them are real, and which are images.

    With `image_tokens` (how many image tokens every sample has, known in advance) the two kinds are gathered into
    tensors of their own, so that each block projects and scores only what it reads; without it each block masks.
    """

    tokens_BMC: Tensor
    valid_BM: Tensor
    image_BM: Tensor
    image_tokens: int | None = None
    text_BNC: Tensor | None = None
    text_valid_BN: Tensor | None = None
    images_BNC: Tensor | None = None

    @staticmethod
    def of(tokens_BMC: Tensor, valid_BM: Tensor, image_BM: Tensor, image_tokens: int | None) -> Context:
        if image_tokens is None:
            return Context(tokens_BMC, valid_BM, image_BM)
        # A stable sort puts image tokens first and keeps the order within each kind; its split point is static.
        order_BM = torch.argsort((~image_BM).to(torch.int8), dim=1, stable=True)
        sorted_BMC = tokens_BMC.gather(1, order_BM[..., None].expand_as(tokens_BMC))
        images_BNC, text_BNC = sorted_BMC.split([image_tokens, tokens_BMC.shape[1] - image_tokens], dim=1)
        text_valid_BN = valid_BM.gather(1, order_BM[:, image_tokens:])
        return Context(tokens_BMC, valid_BM, image_BM, image_tokens, text_BNC, text_valid_BN, images_BNC)

    def part(self, text_every: int | None, text: bool) -> Tensor:
        """The tokens that a block of the kind reads."""
        if text_every is None or self.image_tokens is None:
            return self.tokens_BMC
        return self.text_BNC if text else self.images_BNC

    def mask(self, text_every: int | None, text: bool) -> Mask | None:
        """Which of those tokens count; None: all. The plain DiT ignores padding, as published."""
        if text_every is None:
            return None
        if self.image_tokens is not None:
            return Mask.padding(self.text_valid_BN) if text else None
        wanted_BM = ~self.image_BM if text else self.image_BM
        return Mask.padding(wanted_BM & self.valid_BM)


def bucket_waves(bucket: Tensor, dim: int, shift: float, cos_first: bool) -> Tensor:
    """fp32 [..., dim]: sin and cos of bucket * 10000^(-i / (dim/2 - shift)), i = 0 … dim/2 - 1."""
    half = dim // 2
    exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=bucket.device) / (half - shift)
    angle = bucket.float()[..., None] * exponent.exp()
    parts = [angle.cos(), angle.sin()] if cos_first else [angle.sin(), angle.cos()]
    return torch.cat(parts, dim=-1)
