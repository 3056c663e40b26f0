"""Eagle's SigLIP-2 tower (NaFlex): linear patches, a stretched position table, optional windows and 2-D rotary.

Facts: NVIDIA Eagle3-VL (Eagle-Block2A-2B-v2). Officially tokens are sorted into windows and back; attention
does not depend on their order, so here windows are a mask.
Patches stand in merge order (see `PatchGrid`).

Axes: M images, N patches, D width, S side of the position table, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.models.blocks.attention import QKV, Attention, Mask, merge_heads
from vlaforge.models.blocks.mlp import MLP
from vlaforge.models.blocks.rotary import apply_rotary_pairs
from vlaforge.models.towers.qwen3_vision import PatchGrid


@dataclass(frozen=True)
class Siglip2Config:
    """Defaults: Eagle-Block2A-2B-v2. `table` is the side of the position table; `full_layers` attend to the whole
    image even with `windows`."""

    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp: int = 4304
    patch: int = 14
    table: int = 16
    window: int = 14
    full_layers: tuple[int, ...] = (7, 14, 21, 26)
    rope: bool = False
    windows: bool = False
    merge: int = 2
    eps: float = 1e-6


class Siglip2Layer(nn.Module):
    """Pre-norm: x + attn(LN x), x + MLP(LN x) with GELU (tanh); all with biases."""

    def __init__(self, config: Siglip2Config):
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=config.eps)
        self.qkv = QKV(width, config.heads, config.heads, width // config.heads, bias=True)
        self.attention = Attention()
        self.out_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=config.eps)
        self.mlp = MLP(width, config.mlp, "gelu_tanh")

    def forward(self, x_MND: Tensor, cos_MNJ: Tensor | None, sin_MNJ: Tensor | None, mask: Mask | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_MND))
        if cos_MNJ is not None:
            q, k = apply_rotary_pairs(q, cos_MNJ, sin_MNJ), apply_rotary_pairs(k, cos_MNJ, sin_MNJ)
        x_MND = x_MND + self.out_proj(merge_heads(self.attention(q, k, v, mask)))
        return x_MND + self.mlp(self.norm2(x_MND))


class PoolingHead(nn.Module):
    """The published checkpoint's attention pooling; no GR00T model uses it, the file holds it."""

    def __init__(self, config: Siglip2Config):
        super().__init__()
        width = config.width
        self.probe = nn.Parameter(torch.zeros(1, 1, width))
        self.attention = nn.MultiheadAttention(width, config.heads, batch_first=True)
        self.norm = nn.LayerNorm(width, eps=config.eps)
        self.mlp = MLP(width, config.mlp, "gelu_tanh")


class Siglip2(nn.Module):
    """Patches [M, N, patch²·3] (row, column, channel) → [M, N, D] after the last norm."""

    def __init__(self, config: Siglip2Config):
        super().__init__()
        self.config = config
        self.patch_embed = nn.Linear(3 * config.patch**2, config.width)
        self.positions = nn.Embedding(config.table**2, config.width)
        self.layers = nn.ModuleList(Siglip2Layer(config) for _ in range(config.layers))
        self.post_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.head = PoolingHead(config)
        self.head.requires_grad_(False)

    def patchify(self, images_MCHW: Tensor) -> Tensor:
        """Images → patches in merge order, each (row, column, channel)."""
        p, m = self.config.patch, self.config.merge
        images, c, h, w = images_MCHW.shape
        x = images_MCHW.reshape(images, c, h // p // m, m, p, w // p // m, m, p)
        x = x.permute(0, 2, 5, 3, 6, 4, 7, 1)
        return x.reshape(images, h // p * (w // p), p * p * c)

    def embed_positions(self, grid: PatchGrid) -> Tensor:
        """The table resized to each image, bilinear with antialiasing, as one product of two triangle filters."""
        side = self.config.table
        rows_MNS = triangle_filter(grid.rows_MN, grid.sizes_M2[:, :1], side)
        columns_MNS = triangle_filter(grid.columns_MN, grid.sizes_M2[:, 1:], side)
        weights = (rows_MNS[..., :, None] * columns_MNS[..., None, :]).flatten(2)
        return (weights @ self.positions.weight.float()).to(self.positions.weight.dtype)

    def rotary(self, grid: PatchGrid) -> tuple[Tensor, Tensor]:
        """fp32 [M, N, K/2]: pairs turn by the column and the row in turn. The base is the window size: a quirk of the
        published code (swapped arguments), kept because weights were trained with it."""
        half = self.config.width // self.config.heads // 2
        quarter = half // 2
        exponent = torch.arange(quarter, dtype=torch.float32, device=grid.rows_MN.device) / quarter
        frequency = 1.0 / float(self.config.window) ** exponent
        x, y = (index.float()[..., None] * frequency for index in (grid.columns_MN, grid.rows_MN))
        angle = torch.stack([x, y], dim=-1).flatten(-2)
        return angle.cos(), angle.sin()

    def window_mask(self, grid: PatchGrid) -> Mask:
        """Attention inside windows of `window` × `window` patches."""
        side = self.config.window
        window_MN = grid.rows_MN // side * 4096 + grid.columns_MN // side
        return Mask.segments(torch.where(grid.valid_MN, window_MN, -1))

    def forward(self, patches_MNP: Tensor, grid: PatchGrid, padded: bool) -> Tensor:
        """`padded`: some images have fewer patches than N, so attention masks the rest."""
        config = self.config
        x_MND = self.patch_embed(patches_MNP.to(self.patch_embed.weight.dtype)) + self.embed_positions(grid)
        cos, sin = self.rotary(grid) if config.rope else (None, None)
        full = Mask.padding(grid.valid_MN) if padded else None
        windows = self.window_mask(grid) if config.windows else full
        for i, layer in enumerate(self.layers):
            x_MND = layer(x_MND, cos, sin, full if i in config.full_layers else windows)
        return self.post_norm(x_MND)


def triangle_filter(index_MN: Tensor, size_M1: Tensor, side: int) -> Tensor:
    """fp32 [M, N, side]: weights of table entries for output `index` of `size`, as torch's antialiased bilinear resize.

    The centre of output i lies at (i + 1/2)·side/size; the triangle is as wide as an output step, at least one entry.
    """
    scale_M1 = side / size_M1.clamp_min(1).float()
    width_M1 = scale_M1.clamp_min(1.0)
    centre_MN = (index_MN.float() + 0.5) * scale_M1
    entry_S = torch.arange(side, device=index_MN.device, dtype=torch.float32) + 0.5
    weight_MNS = (1 - (entry_S - centre_MN[..., None]).abs() / width_M1[..., None]).clamp_min(0)
    return weight_MNS / weight_MNS.sum(-1, keepdim=True).clamp_min(1e-6)


class PixelShuffleProjector(nn.Module):
    """Joins 2 × 2 patches channel by channel, then LN, Linear, GELU (erf), Linear (Eagle's ``mlp1``)."""

    def __init__(self, width: int, merge: int, output: int):
        super().__init__()
        joined = width * merge**2
        self.group = merge**2
        self.norm = nn.LayerNorm(joined, eps=1e-5)
        self.fc1 = nn.Linear(joined, output)
        self.fc2 = nn.Linear(output, output)

    def forward(self, x_MND: Tensor) -> Tensor:
        """[M, N, D] in merge order → [M, N / merge², output]; joined values are channel-major."""
        joined = x_MND.unflatten(1, (-1, self.group)).transpose(-1, -2).flatten(2)
        return self.fc2(F.gelu(self.fc1(self.norm(joined))))
