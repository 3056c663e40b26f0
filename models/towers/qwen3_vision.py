"""Qwen3-VL's vision tower: patches with bilinear positions and 2-D rotary, merged 2 × 2, with DeepStack outputs.

Facts: transformers ``models/qwen3_vl``. Images of a batch are rows of one tensor, padded to the same number of patches;
positions are computed on the device from each image's grid, so nothing waits for the host.

Axes: M images, N patches (in merge order: the 4 patches of a merged token stand together), D width, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.models.blocks.attention import Attention, Mask, merge_heads
from vlaforge.models.blocks.mlp import MLP
from vlaforge.models.blocks.rotary import Rotary


@dataclass(frozen=True)
class Qwen3VisionConfig:
    """Defaults: Qwen3-VL-2B. `table` is the side of the square position table; `deepstack` the blocks tapped."""

    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp: int = 4096
    patch: int = 16
    frames: int = 2
    merge: int = 2
    table: int = 48
    deepstack: tuple[int, ...] = (5, 11, 17)
    output: int = 2048
    theta: float = 10000.0
    eps: float = 1e-6

    @property
    def patch_values(self) -> int:
        return 3 * self.frames * self.patch**2


@dataclass(frozen=True)
class PatchGrid:
    """Where each patch lies: rows and columns int64 [M, N], validity bool [M, N], grid sizes int64 [M, 2]."""

    rows_MN: Tensor
    columns_MN: Tensor
    valid_MN: Tensor
    sizes_M2: Tensor

    @staticmethod
    def of(sizes_M2: Tensor, patches: int, merge: int) -> PatchGrid:
        """The grid of images of `sizes` (rows, columns of patches) in merge order, padded to `patches`."""
        index_N = torch.arange(patches, device=sizes_M2.device)
        height_M1, width_M1 = sizes_M2[:, :1], sizes_M2[:, 1:]
        block_N, inside_N = index_N // merge**2, index_N % merge**2
        per_row_M1 = (width_M1 // merge).clamp_min(1)
        rows_MN = block_N // per_row_M1 * merge + inside_N // merge
        columns_MN = block_N % per_row_M1 * merge + inside_N % merge
        return PatchGrid(rows_MN, columns_MN, index_N < height_M1 * width_M1, sizes_M2)


class Qwen3VisionBlock(nn.Module):
    """Pre-norm: x + attn(LN x), x + MLP(LN x) with GELU (tanh)."""

    def __init__(self, config: Qwen3VisionConfig):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, eps=config.eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.rotary = Rotary()
        self.attention = Attention()
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=config.eps)
        self.mlp = MLP(width, config.mlp, "gelu_tanh")

    def forward(self, x_MND: Tensor, cos_MNJ: Tensor, sin_MNJ: Tensor, mask: Mask | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_MND)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.attention(self.rotary(q, cos_MNJ, sin_MNJ), self.rotary(k, cos_MNJ, sin_MNJ), v, mask)
        x_MND = x_MND + self.proj(merge_heads(mixed))
        return x_MND + self.mlp(self.norm2(x_MND))


class PatchMerger(nn.Module):
    """Joins `merge`² neighbouring patches into one token; the norm acts before joining or (DeepStack) after."""

    def __init__(self, config: Qwen3VisionConfig, norm_joined: bool):
        super().__init__()
        joined = config.width * config.merge**2
        self.group, self.norm_joined = config.merge**2, norm_joined
        self.norm = nn.LayerNorm(joined if norm_joined else config.width, eps=config.eps)
        self.fc1 = nn.Linear(joined, joined)
        self.fc2 = nn.Linear(joined, config.output)

    def forward(self, x_MND: Tensor) -> Tensor:
        if not self.norm_joined:
            x_MND = self.norm(x_MND)
        joined = x_MND.unflatten(1, (-1, self.group)).flatten(2)
        if self.norm_joined:
            joined = self.norm(joined)
        return self.fc2(F.gelu(self.fc1(joined)))


class Qwen3Vision(nn.Module):
    """Patches [M, N, 3·frames·patch²] → merged tokens [M, N / merge², output] and the DeepStack ones."""

    def __init__(self, config: Qwen3VisionConfig):
        super().__init__()
        self.config = config
        # The published 3-D convolution has kernel = stride = the whole patch: a linear layer on flat patches.
        self.patch_embed = nn.Linear(config.patch_values, config.width)
        self.positions = nn.Embedding(config.table**2, config.width)
        self.blocks = nn.ModuleList(Qwen3VisionBlock(config) for _ in range(config.layers))
        self.merger = PatchMerger(config, norm_joined=False)
        self.deepstack_mergers = nn.ModuleList(PatchMerger(config, norm_joined=True) for _ in config.deepstack)

    def patchify(self, images_MCHW: Tensor) -> Tensor:
        """Normalised images → patches in merge order, each value order (channel, frame, row, column); a still image
        fills all frames."""
        config = self.config
        p, m, f = config.patch, config.merge, config.frames
        images, c, h, w = images_MCHW.shape
        x = images_MCHW.view(images, c, h // p // m, m, p, w // p // m, m, p)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # image, block row, block column, row, column in it, c, y, x
        x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, f, -1, -1)
        return x.reshape(images, h // p * (w // p), config.patch_values)

    def embed_positions(self, grid: PatchGrid) -> Tensor:
        """The position table stretched over each image: bilinear between the four nearest entries. [M, N, D]"""
        last = self.config.table - 1

        def along(index_MN: Tensor, size_M1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = spread(index_MN, size_M1, last)
            low = at.floor()
            return low.long(), (low.long() + 1).clamp_max(last), at - low

        row0, row1, dr = along(grid.rows_MN, grid.sizes_M2[:, :1])
        col0, col1, dc = along(grid.columns_MN, grid.sizes_M2[:, 1:])
        corners = (
            (row0, col0, (1 - dr) * (1 - dc)),
            (row0, col1, (1 - dr) * dc),
            (row1, col0, dr * (1 - dc)),
            (row1, col1, dr * dc),
        )
        weight_dtype = self.positions.weight.dtype
        parts = [
            self.positions(r * self.config.table + c) * weight[..., None].to(weight_dtype) for r, c, weight in corners
        ]
        return parts[0] + parts[1] + parts[2] + parts[3]

    def rotary(self, grid: PatchGrid) -> tuple[Tensor, Tensor]:
        """fp32 [M, N, K/2]: half of the frequencies turn by the row, half by the column."""
        quarter = self.config.width // self.config.heads // 4
        exponent = torch.arange(quarter, dtype=torch.float32, device=grid.rows_MN.device) / quarter
        frequency = 1.0 / self.config.theta**exponent
        angles = [index.float()[..., None] * frequency for index in (grid.rows_MN, grid.columns_MN)]
        angle_MNJ = torch.cat(angles, dim=-1)
        return angle_MNJ.cos(), angle_MNJ.sin()

    def forward(self, patches_MNP: Tensor, grid: PatchGrid, padded: bool) -> tuple[Tensor, list[Tensor]]:
        """`padded`: some images have fewer patches than N, so attention masks the rest."""
        x_MND = self.patch_embed(patches_MNP.to(self.patch_embed.weight.dtype)) + self.embed_positions(grid)
        cos_MNJ, sin_MNJ = self.rotary(grid)
        mask = Mask.padding(grid.valid_MN) if padded else None
        deepstack = []
        for i, block in enumerate(self.blocks):
            x_MND = block(x_MND, cos_MNJ, sin_MNJ, mask)
            if i in self.config.deepstack:
                deepstack.append(self.deepstack_mergers[self.config.deepstack.index(i)](x_MND))
        return self.merger(x_MND), deepstack


def spread(index: Tensor, size: Tensor, last: int) -> Tensor:
    """fp32 ``linspace(0, last, size)[index]`` computed as torch does it: from the nearer end."""
    step = last / (size - 1).clamp_min(1).float()
    forward = index.float() * step
    backward = last - (size - 1 - index).float() * step
    return torch.where(index < size // 2, forward, backward).clamp(0, last)
