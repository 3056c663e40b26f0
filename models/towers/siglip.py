"""SigLIP's vision transformer as a feature extractor: no class token, no pooling head.

Facts: Zhai et al. 2023 (arXiv 2303.15343), transformers ``models/siglip``. The defaults are So400m/14 at 224 pixels.

Axes: N images, L patches of an image (row by row), W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlaforge.models.blocks.attention import QKV, Attention, merge_heads
from vlaforge.models.blocks.linear import Multiplying
from vlaforge.models.blocks.mlp import MLP


@dataclass(frozen=True)
class SiglipConfig:
    """Args:
    width, depth, num_heads, mlp_dim: of the transformer. patch_size: pixels a side. eps: of all LayerNorms.
    """

    width: int = 1152
    depth: int = 27
    num_heads: int = 16
    mlp_dim: int = 4304
    patch_size: int = 14
    eps: float = 1e-6

    def tokens(self, image_size: int) -> int:
        """Patches of a square image."""
        return (image_size // self.patch_size) ** 2


class PatchEmbed(Multiplying):
    """Cuts an image into patches and projects each: a convolution whose stride is its kernel, as one matrix product."""

    def __init__(self, width: int, patch_size: int):
        super().__init__()
        self.patch_size = patch_size
        conv = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, images_N3SS: Tensor) -> Tensor:
        """[N, 3, S, S] → [N, L, W] in the weight's dtype; pixels beyond the last whole patch are left out."""
        return self.product(self.patches(images_N3SS), self.weight.flatten(1), self.bias)

    def patches(self, images_N3SS: Tensor) -> Tensor:
        """[N, 3, S, S] → [N, L, 3·p·p] in the weight's dtype."""
        n, channels, height, width = images_N3SS.shape
        p = self.patch_size
        rows, columns = height // p, width // p
        whole = images_N3SS[:, :, : rows * p, : columns * p].to(self.weight.dtype)
        patches = whole.reshape(n, channels, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(n, rows * columns, channels * p * p)

    def extra_repr(self) -> str:
        return f"3, {self.weight.shape[0]}, patch_size={self.patch_size}"


class SiglipLayer(nn.Module):
    """Pre-norm: x + attn(LN x), x + MLP(LN x); full attention, GELU (tanh), biases everywhere."""

    def __init__(self, config: SiglipConfig):
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=config.eps)
        self.qkv = QKV(width, config.num_heads, config.num_heads, width // config.num_heads, bias=True)
        self.attend = Attention()
        self.out_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=config.eps)
        self.mlp = MLP(width, config.mlp_dim, "gelu_tanh")

    def forward(self, x_NLW: Tensor) -> Tensor:
        x_NLW = x_NLW + self.out_proj(merge_heads(self.attend(*self.qkv(self.norm1(x_NLW)))))
        return x_NLW + self.mlp(self.norm2(x_NLW))


class Siglip(nn.Module):
    """Patches, learned positions, layers, final LayerNorm."""

    def __init__(self, config: SiglipConfig, image_size: int):
        super().__init__()
        self.patch = PatchEmbed(config.width, config.patch_size)
        self.positions = nn.Embedding(config.tokens(image_size), config.width)
        nn.init.normal_(self.positions.weight, std=config.width**-0.5)
        self.layers = nn.ModuleList(SiglipLayer(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, images_N3SS: Tensor) -> Tensor:
        """[N, 3, S, S] in [-1, 1] → [N, L, W]."""
        x_NLW = self.embed(images_N3SS)
        for layer in self.layers:
            x_NLW = layer(x_NLW)
        return self.norm(x_NLW)

    def embed(self, images_N3SS: Tensor) -> Tensor:
        """Patches with their positions, in the layers' dtype (the two tables may be kept in fp32)."""
        positions_LW = self.positions(torch.arange(self.positions.num_embeddings, device=images_N3SS.device))
        return (self.patch(images_N3SS) + positions_LW).to(self.norm.weight.dtype)
