"""Qwen3's decoder as a feature extractor: left-padded tokens in, hidden states out, no logits.

Facts: transformers ``models/qwen3``, ``models/qwen3_vl``. Rotary tables are given, so plain positions (GR00T N1.6) and
interleaved M-RoPE (GR00T N1.7) are the same code.

Axes: B samples, T tokens, D width, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlaforge.models.blocks.attention import QKV, Attention, Mask, merge_heads
from vlaforge.models.blocks.mlp import GatedMLP
from vlaforge.models.blocks.norms import NormWeight, RMSNorm
from vlaforge.models.blocks.rotary import HeadNormRotary


@dataclass(frozen=True)
class Qwen3Config:
    """Defaults: Qwen3-1.7B, cut to the 16 layers that GR00T keeps. `mrope` are the half-width sections of time, row
    and column; None: plain rotary."""

    vocab_size: int = 151936
    width: int = 2048
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 6144
    theta: float = 5e6
    mrope: tuple[int, int, int] | None = (24, 20, 20)
    eps: float = 1e-6


class Qwen3Attention(nn.Module):
    """Grouped-query attention with RMS-normalised queries and keys (per head), no biases."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.qkv = QKV(config.width, config.heads, config.kv_heads, config.head_dim)
        self.q_norm, self.k_norm = NormWeight(config.head_dim), NormWeight(config.head_dim)
        self.norm_rotary = HeadNormRotary(config.eps)
        self.attention = Attention()
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor, mask: Mask) -> Tensor:
        q_BHTK, k_BGTK, v_BGTK = self.qkv(x_BTD)
        weights = self.q_norm.weight, self.k_norm.weight
        q_BHTK, k_BGTK = self.norm_rotary(q_BHTK, k_BGTK, *weights, cos_BTJ, sin_BTJ)
        return self.o_proj(merge_heads(self.attention(q_BHTK, k_BGTK, v_BGTK, mask)))


class Qwen3Layer(nn.Module):
    """Pre-norm: x + attn(RMS x), x + SwiGLU(RMS x)."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.input_norm = RMSNorm(config.width, config.eps)
        self.attn = Qwen3Attention(config)
        self.post_norm = RMSNorm(config.width, config.eps)
        self.mlp = GatedMLP(config.width, config.mlp, "silu")

    def forward(self, x_BTD: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor, mask: Mask) -> Tensor:
        x_BTD = x_BTD + self.attn(self.input_norm(x_BTD), cos_BTJ, sin_BTJ, mask)
        return x_BTD + self.mlp(self.post_norm(x_BTD))


class Qwen3(nn.Module):
    """Token embedding, layers and the final norm; the caller decides whether the norm is applied."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Qwen3Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [B, T, K/2], for positions [B, T], or [B, 3, T] (time, row, column) with M-RoPE."""
        config = self.config
        half = config.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        frequency_J = 1.0 / config.theta**exponent
        if config.mrope is None:
            angle_BTJ = positions.float()[..., None] * frequency_J
        else:
            angle_B3TJ = positions.float()[..., None] * frequency_J
            # Interleaved: frequencies 1, 4, 7, … turn by the row and 2, 5, 8, … by the column, as far as their sections
            # reach; all others turn by the time.
            j = torch.arange(half, device=positions.device)
            row = (j % 3 == 1) & (j < 3 * config.mrope[1])
            column = (j % 3 == 2) & (j < 3 * config.mrope[2])
            angle_BTJ = torch.where(row, angle_B3TJ[:, 1], torch.where(column, angle_B3TJ[:, 2], angle_B3TJ[:, 0]))
        return angle_BTJ.cos(), angle_BTJ.sin()

    def forward(
        self,
        x_BTD: Tensor,
        positions: Tensor,
        valid_BT: Tensor,
        deepstack: Sequence[Tensor] = (),
        first: int = 0,
        last: int | None = None,
    ) -> Tensor:
        """Embeddings (or the output of layer `first` - 1) → the output of layer `last` - 1, before the final norm.

        `deepstack[i]` [B, T, D] is added to layer i's output (zero where there is no image).
        """
        cos_BTJ, sin_BTJ = self.rotary(positions)
        mask = Mask.causal_padding(valid_BT)
        for i in range(first, len(self.layers) if last is None else last):
            x_BTD = self.layers[i](x_BTD, cos_BTJ, sin_BTJ, mask)
            if i < len(deepstack):
                x_BTD = x_BTD + deepstack[i]
        return x_BTD


def place_images(x_BTD: Tensor, features_BFD: Tensor, image_BT: Tensor, valid_BF: Tensor | None = None) -> Tensor:
    """`x` with its image positions replaced, in order, by the sample's valid `features`; no host sync.

    Args:
        features_BFD: image tokens of each sample, in reading order.
        image_BT: True at image positions, as many a sample as it has valid features.
        valid_BF: False for features that are padding; None: all count.
    """
    if valid_BF is not None:
        order_BF = torch.argsort((~valid_BF).to(torch.int8), dim=1, stable=True)
        features_BFD = features_BFD.gather(1, order_BF[..., None].expand_as(features_BFD))
    number_BT = (image_BT.cumsum(1) - 1).clamp(0, features_BFD.shape[1] - 1)
    placed_BTD = features_BFD.gather(1, number_BT[..., None].expand(-1, -1, features_BFD.shape[-1]))
    return torch.where(image_BT[..., None], placed_BTD.to(x_BTD.dtype), x_BTD)
