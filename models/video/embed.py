"""Wan's embeddings and head: patches, time, text in; modulated projection to patches out. Official parameter names.

Axes: B samples, C latent channels, F latent frames, G groups of tokens that share a time (frames, or 1), S tokens,
D width, L text tokens, P channels of an output patch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vlaforge.models.blocks.linear import Multiplying
from vlaforge.models.blocks.modulation import ModulatedLayerNorm


class PatchEmbedding(Multiplying):
    """Latents [B, C, F, h, w] → tokens [B, S, D], frame by frame and row by row.

    The official parameter is a Conv3d whose kernel equals its stride; that is one matrix product over the patches.
    """

    def __init__(self, channels: int, dim: int, patch: tuple[int, int, int]):
        super().__init__()
        self.patch = patch
        self.weight = nn.Parameter(torch.empty(dim, channels, *patch))
        self.bias = nn.Parameter(torch.zeros(dim))
        nn.init.xavier_uniform_(self.weight.flatten(1))

    def forward(self, x_BCFhw: Tensor) -> Tensor:
        """ValueError when the latent's sizes are no multiples of the patch."""
        b, c, *sizes = x_BCFhw.shape
        if any(size % p for size, p in zip(sizes, self.patch)):
            raise ValueError(f"latents of {sizes} (frames, rows, columns) do not split into patches of {self.patch}")
        (f, h, w), (pt, ph, pw) = (size // p for size, p in zip(sizes, self.patch)), self.patch
        patches = x_BCFhw.reshape(b, c, f, pt, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
        patches = patches.reshape(b, f * h * w, -1).to(self.weight.dtype)
        return self.product(patches, self.weight.flatten(1), self.bias)


def unpatch(x_BSP: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """Tokens [B, S, pt·ph·pw·C] (channel fastest) over a grid of patches → [B, C, F, h, w]."""
    (f, h, w), (pt, ph, pw) = grid, patch
    x = x_BSP.reshape(x_BSP.shape[0], f, h, w, pt, ph, pw, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return x.reshape(x.shape[0], x.shape[1], f * pt, h * ph, w * pw)


def sinusoid(time: Tensor, dim: int, theta: float = 10000.0) -> Tensor:
    """fp32 [..., dim]: cos, then sin, of time · θ^(-i / (dim/2)); angles in fp64, as officially."""
    half = dim // 2
    frequency = torch.exp(torch.arange(half, device=time.device, dtype=torch.float64) * (-math.log(theta) / half))
    angle = time.double()[..., None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


class TimeEmbedding(nn.Module):
    """Times in 0..1000 → (t [B, G, D] for the head, modulation [B, G, 6, D] for all blocks), fp32.

    `G` counts groups of tokens with one time each: a video's frames, or 1. The result is never expanded to tokens.
    """

    def __init__(self, dim: int, freq_dim: int):
        super().__init__()
        self.freq_dim = freq_dim
        self.embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        for linear in (self.embedding[0], self.embedding[2]):
            nn.init.normal_(linear.weight, std=0.02)

    def forward(self, time_BG: Tensor) -> tuple[Tensor, Tensor]:
        weight_dtype = self.embedding[0].weight.dtype
        t_BGD = self.embedding(sinusoid(time_BG, self.freq_dim).to(weight_dtype))
        return t_BGD.float(), self.projection(t_BGD).unflatten(-1, (6, -1)).float()


class TextEmbedding(nn.Sequential):
    """Encoded text [B, L, T] → [B, L, D]: Linear, GELU (tanh), Linear. A zero row does not become zero (biases)."""

    def __init__(self, text_dim: int, dim: int):
        super().__init__(nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim))
        for linear in (self[0], self[2]):
            nn.init.normal_(linear.weight, std=0.02)


class Head(nn.Module):
    """Modulated LayerNorm and a projection to patches; (shift, scale) = table + t, with t before its projection."""

    def __init__(self, dim: int, channels: int, patch: tuple[int, int, int], eps: float):
        super().__init__()
        self.norm = ModulatedLayerNorm(dim, eps)
        self.head = nn.Linear(dim, channels * math.prod(patch))
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x_BSD: Tensor, t_BGD: Tensor) -> Tensor:
        """Tokens [B, S, D] in G equal groups, t [B, G, D] → patches [B, S, P]."""
        shift, scale = (self.modulation[:, None].float() + t_BGD[:, :, None]).unbind(2)
        return self.head(self.norm(x_BSD, scale, shift))
