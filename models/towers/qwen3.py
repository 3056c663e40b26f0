"""Qwen3's decoder as a feature extractor: left-padded tokens in, hidden states out, no logits.

Facts: transformers ``models/qwen3``, ``models/qwen3_vl``. Rotary tables are given, so plain positions (GR00T N1.6) and
interleaved M-RoPE (GR00T N1.7) are the same code.

Axes: B samples, T tokens, D width, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vlaforge.models.blocks.attention import Mask, attention
from vlaforge.models.blocks.mlp import GatedMLP
from vlaforge.models.blocks.norms import RMSNorm
from vlaforge.models.blocks.rotary import apply_rotary


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
        width, k = config.width, config.head_dim
        self.head_dim = k
        self.q_proj = nn.Linear(width, config.heads * k, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * k, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * k, bias=False)
        self.o_proj = nn.Linear(config.heads * k, width, bias=False)
        self.q_norm = RMSNorm(k, config.eps)
        self.k_norm = RMSNorm(k, config.eps)

    def forward(self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, mask: Mask) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.head_dim))

        q_BHTK = self.q_norm(heads(self.q_proj(x_BTD))).transpose(1, 2)
        k_BGTK = self.k_norm(heads(self.k_proj(x_BTD))).transpose(1, 2)
        v_BGTK = heads(self.v_proj(x_BTD)).transpose(1, 2)
        q_BHTK = apply_rotary(q_BHTK, cos_BTK, sin_BTK)
        k_BGTK = apply_rotary(k_BGTK, cos_BTK, sin_BTK)
        return self.o_proj(attention(q_BHTK, k_BGTK, v_BGTK, mask).transpose(1, 2).flatten(2))


class Qwen3Layer(nn.Module):
    """Pre-norm: x + attn(RMS x), x + SwiGLU(RMS x)."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.input_norm = RMSNorm(config.width, config.eps)
        self.attn = Qwen3Attention(config)
        self.post_norm = RMSNorm(config.width, config.eps)
        self.mlp = GatedMLP(config.width, config.mlp, "silu")

    def forward(self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, mask: Mask) -> Tensor:
        x_BTD = x_BTD + self.attn(self.input_norm(x_BTD), cos_BTK, sin_BTK, mask)
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
        """cos and sin, fp32 [B, T, K], for positions [B, T], or [B, 3, T] (time, row, column) with M-RoPE."""
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
        angle_BTK = torch.cat([angle_BTJ, angle_BTJ], dim=-1)
        return angle_BTK.cos(), angle_BTK.sin()

    def forward(self, x_BTD: Tensor, positions: Tensor, valid_BT: Tensor, deepstack: list[Tensor] = ()) -> Tensor:
        """Embeddings → the last layer's output, before the final norm.

        `deepstack[i]` [B, T, D] is added to layer i's output (zero where there is no image).
        """
        cos_BTK, sin_BTK = self.rotary(positions)
        mask = Mask.causal_padding(valid_BT)
        for i, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, cos_BTK, sin_BTK, mask)
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
