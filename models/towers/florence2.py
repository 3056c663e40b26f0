"""Florence-2's encoder side: DaViT, the projector to the text width, and BART's encoder.

Facts: microsoft/Florence-2-large, transformers 5.5 ``models/florence2`` and ``models/bart``.
Dropout and stochastic depth are counter based (see `blocks/dropout.py`).

Axes: N images, L tokens of an image (row by row), C channels, h w rows and columns; B samples, T text tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.models.blocks.attention import QKV, Attention, merge_heads
from vlaforge.models.blocks.dropout import Dropout
from vlaforge.models.blocks.padding import padded


@dataclass(frozen=True)
class DaViTConfig:
    """The vision tower (defaults: Florence-2-large). Entries of a tuple are one a stage."""

    dims: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (1, 1, 9, 1)
    heads: tuple[int, ...] = (8, 16, 32, 64)
    groups: tuple[int, ...] = (8, 16, 32, 64)
    kernels: tuple[int, ...] = (7, 3, 3, 3)
    strides: tuple[int, ...] = (4, 2, 2, 2)
    paddings: tuple[int, ...] = (3, 1, 1, 1)
    prenorm: tuple[bool, ...] = (False, True, True, True)
    window: int = 12
    mlp_ratio: float = 4.0
    drop_path: float = 0.1
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("depths", "heads", "groups", "kernels", "strides", "paddings", "prenorm"):
            if len(getattr(self, name)) != len(self.dims):
                raise UserError(
                    f"model.vision.{name} has {len(getattr(self, name))} entries and model.vision.dims "
                    f"{len(self.dims)}: both have one for each stage."
                )

    def tokens(self, size: int) -> int:
        """How many tokens an image of size × size pixels gives after the last stage."""
        for kernel, stride, padding in zip(self.kernels, self.strides, self.paddings):
            size = (size + 2 * padding - kernel) // stride + 1
        return size * size


class ConvEmbed(nn.Module):
    """A strided convolution with a LayerNorm over channels before it (`prenorm`) or after it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, padding: int, prenorm: bool, eps: float):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)
        self.norm = nn.LayerNorm(inputs if prenorm else outputs, eps=eps)
        self.prenorm = prenorm

    def forward(self, x_NhwC: Tensor) -> Tensor:
        if self.prenorm:
            x_NhwC = self.norm(x_NhwC)
        x_NhwC = self.convolve(x_NhwC)
        return x_NhwC if self.prenorm else self.norm(x_NhwC)

    def convolve(self, x_NhwC: Tensor) -> Tensor:
        """Channels-last memory throughout: the permutes are views, and the convolution takes it as it is."""
        return _channels_last(self.conv, x_NhwC)


class WindowAttention(nn.Module):
    """Attention inside windows of `window` × `window`; zero padding at the right and bottom takes part.

    Padding has the bias for its query, key and value, and its output is cut away: it goes through no product, which
    saves two thirds of them where 14 rows are padded to 24.
    """

    def __init__(self, dim: int, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention = Attention()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x_NhwC: Tensor) -> Tensor:
        n, h, w, c = x_NhwC.shape
        side = self.window
        down, right = -h % side, -w % side
        qkv = self.qkv(x_NhwC)  # [N, h, w, 3·C]
        qkv = padded(qkv, self.qkv.bias.to(qkv.dtype), down, right)
        rows, columns = (h + down) // side, (w + right) // side
        split = qkv.view(n, rows, side, columns, side, 3, self.heads, c // self.heads).permute(5, 0, 1, 3, 6, 2, 4, 7)
        q, k, v = split.reshape(3, n * rows * columns, self.heads, side * side, c // self.heads)
        out = self.attention(q, k, v).reshape(n, rows, columns, self.heads, side, side, -1).permute(0, 1, 4, 2, 5, 3, 6)
        return self.proj(out.reshape(n, h + down, w + right, c)[:, :h, :w])


class ChannelAttention(nn.Module):
    """Attention between the channels of a group; the tokens are the features, so the scale is L^-1/2."""

    def __init__(self, dim: int, groups: int):
        super().__init__()
        self.groups = groups
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention = Attention()  # scales by the width of a key, which is L here
        self.proj = nn.Linear(dim, dim)

    def forward(self, x_NhwC: Tensor) -> Tensor:
        n, h, w, c = x_NhwC.shape
        qkv = self.qkv(x_NhwC).view(n, h * w, 3, self.groups, c // self.groups)
        q, k, v = qkv.permute(2, 0, 3, 4, 1)  # each [N, groups, channels of a group, L]
        out_NgcL = self.attention(q, k, v)
        return self.proj(out_NgcL.permute(0, 3, 1, 2).reshape(n, h, w, c))


class DaViTHalf(nn.Module):
    """x + dwconv(x), + attention(LN x), + dwconv, + MLP(LN x): one half of a DaViT block, by kind of attention."""

    def __init__(self, dim: int, attn: nn.Module, config: DaViTConfig, drop_path: float, salts: Iterator[int]):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm1 = nn.LayerNorm(dim, eps=config.eps)
        self.attn = attn
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm2 = nn.LayerNorm(dim, eps=config.eps)
        self.fc1 = nn.Linear(dim, int(dim * config.mlp_ratio))
        self.act = nn.GELU()
        self.fc2 = nn.Linear(int(dim * config.mlp_ratio), dim)
        self.drop1 = Dropout(drop_path, next(salts), whole_sample=True)
        self.drop2 = Dropout(drop_path, next(salts), whole_sample=True)

    def forward(self, x_NhwC: Tensor, seed_N: Tensor | None) -> Tensor:
        x_NhwC = x_NhwC + _channels_last(self.conv1, x_NhwC)
        x_NhwC = x_NhwC + self.drop1(self.attn(self.norm1(x_NhwC)), seed_N)
        x_NhwC = x_NhwC + _channels_last(self.conv2, x_NhwC)
        return x_NhwC + self.drop2(self.fc2(self.act(self.fc1(self.norm2(x_NhwC)))), seed_N)


def _channels_last(conv: nn.Conv2d, x_NhwC: Tensor) -> Tensor:
    return conv(x_NhwC.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class DaViTBlock(nn.Module):
    """Spatial (window attention) half, then channel half."""

    def __init__(self, stage: int, config: DaViTConfig, drop_paths: tuple[float, float], salts: Iterator[int]):
        super().__init__()
        dim = config.dims[stage]
        window = WindowAttention(dim, config.heads[stage], config.window)
        self.spatial = DaViTHalf(dim, window, config, drop_paths[0], salts)
        channel = ChannelAttention(dim, config.groups[stage])
        self.channel = DaViTHalf(dim, channel, config, drop_paths[1], salts)

    def forward(self, x_NhwC: Tensor, seed_N: Tensor | None) -> Tensor:
        return self.channel(self.spatial(x_NhwC, seed_N), seed_N)


class DaViTStage(nn.Module):
    """Downsampling embedding, then the stage's blocks."""

    def __init__(self, stage: int, config: DaViTConfig, drop_paths: list[float], salts: Iterator[int]):
        super().__init__()
        inputs = 3 if stage == 0 else config.dims[stage - 1]
        shape = (config.kernels[stage], config.strides[stage], config.paddings[stage], config.prenorm[stage])
        self.embed = ConvEmbed(inputs, config.dims[stage], *shape, eps=config.eps)
        self.blocks = nn.ModuleList(
            DaViTBlock(stage, config, (drop_paths[2 * i], drop_paths[2 * i + 1]), salts)
            for i in range(config.depths[stage])
        )

    def forward(self, x_NhwC: Tensor, seed_N: Tensor | None) -> Tensor:
        x_NhwC = self.embed(x_NhwC)
        for block in self.blocks:
            x_NhwC = block(x_NhwC, seed_N)
        return x_NhwC


class DaViT(nn.Module):
    """Images [N, 3, H, W], normalised → feature map [N, h, w, C] of the last stage."""

    def __init__(self, config: DaViTConfig, salts: Iterator[int] | None = None):
        super().__init__()
        salts = count() if salts is None else salts
        # Stochastic depth grows linearly over all halves, spatial before channel in each block.
        halves = 2 * sum(config.depths)
        rates = [config.drop_path * i / max(halves - 1, 1) for i in range(halves)]
        self.stages = nn.ModuleList()
        for stage, depth in enumerate(config.depths):
            first = 2 * sum(config.depths[:stage])
            self.stages.append(DaViTStage(stage, config, rates[first : first + 2 * depth], salts))

    def forward(self, images_NCHW: Tensor, seed_N: Tensor | None = None) -> Tensor:
        x_NhwC = images_NCHW.permute(0, 2, 3, 1)
        for stage in self.stages:
            x_NhwC = stage(x_NhwC, seed_N)
        return x_NhwC


class Florence2Projector(nn.Module):
    """Feature map → [mean of the tokens; the tokens] at the text width, with learned 2-D positions.

    Args:
        channels: C of the map (even).
        width: D of the text encoder.
        positions: rows and columns that have a learned position.
        frames: length of the temporal table; one frame is used here (row 0).
    """

    def __init__(self, channels: int, width: int, positions: int = 50, frames: int = 100, eps: float = 1e-5):
        super().__init__()
        self.rows = nn.Embedding(positions, channels // 2)
        self.columns = nn.Embedding(positions, channels - channels // 2)
        self.register_buffer("temporal", sinusoid_table(frames, channels))
        self.projection = nn.Linear(channels, width, bias=False)
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, map_NhwC: Tensor) -> Tensor:
        """[N, h, w, C] → [N, 1 + h*w, D]."""
        n, h, w, c = map_NhwC.shape
        columns_wC = self.columns.weight[:w].expand(h, w, -1)
        rows_hC = self.rows.weight[:h, None].expand(h, w, -1)
        positions_hwC = torch.cat([columns_wC, rows_hC], dim=-1)
        tokens_NLC = (map_NhwC + positions_hwC).reshape(n, h * w, c) + self.temporal[0].to(map_NhwC.dtype)
        return self.norm(self.projection(torch.cat([tokens_NLC.mean(1, keepdim=True), tokens_NLC], dim=1)))


def sinusoid_table(length: int, channels: int) -> Tensor:
    """fp32 [length, channels]: sin in even columns, cos in odd ones, frequencies 10000^(-i / half)."""
    half = channels // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / half))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, 2 * half)


@dataclass(frozen=True)
class BartConfig:
    """BART's encoder (defaults: Florence-2-large). Dropout rates act in training only. `pad_token`'s embedding is read
    (padding is attended to) but never trained, as published."""

    vocab_size: int = 51289
    pad_token: int = 1
    width: int = 1024
    layers: int = 12
    heads: int = 16
    mlp: int = 4096
    max_positions: int = 4096
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    eps: float = 1e-5


class BartLayer(nn.Module):
    """Post-norm encoder layer: x = LN(x + attn(x)); x = LN(x + MLP(x)), GELU (erf). No mask: all tokens are seen."""

    def __init__(self, config: BartConfig, salts: Iterator[int]):
        super().__init__()
        width = config.width
        self.qkv = QKV(width, config.heads, config.heads, width // config.heads, bias=True)
        self.out_proj = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=config.eps)
        self.fc1 = nn.Linear(width, config.mlp)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(config.mlp, width)
        self.norm2 = nn.LayerNorm(width, eps=config.eps)
        self.drop1 = Dropout(config.dropout, next(salts))
        self.drop_activation = Dropout(config.activation_dropout, next(salts))
        self.drop2 = Dropout(config.dropout, next(salts))
        self.attention = DropoutAttention(Dropout(config.attention_dropout, next(salts)))

    def forward(self, x_BTD: Tensor, seed_B: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x_BTD)
        mixed_BTD = merge_heads(self.attention(q, k, v, seed_B))
        x_BTD = self.norm1(x_BTD + self.drop1(self.out_proj(mixed_BTD), seed_B))
        hidden = self.drop_activation(self.act(self.fc1(x_BTD)), seed_B)
        return self.norm2(x_BTD + self.drop2(self.fc2(hidden), seed_B))


class BartEncoder(nn.Module):
    """Embeddings [B, T, D] (text and image tokens joined) → [B, T, D]; `embed` gives the text's."""

    OFFSET = 2  # BART's position table starts with two unused rows

    def __init__(self, config: BartConfig, salts: Iterator[int] | None = None):
        super().__init__()
        salts = count(10_000) if salts is None else salts
        self.tokens = nn.Embedding(config.vocab_size, config.width, padding_idx=config.pad_token)
        self.positions = nn.Embedding(config.max_positions + self.OFFSET, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.drop = Dropout(config.dropout, next(salts))
        self.layers = nn.ModuleList(BartLayer(config, salts) for _ in range(config.layers))

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return self.tokens(tokens_BT)

    def forward(self, x_BTD: Tensor, seed_B: Tensor | None = None) -> Tensor:
        positions_TD = self.positions.weight[self.OFFSET : self.OFFSET + x_BTD.shape[1]]
        x_BTD = self.drop(self.norm(x_BTD + positions_TD), seed_B)
        for layer in self.layers:
            x_BTD = layer(x_BTD, seed_B)
        return x_BTD


class DropoutAttention(nn.Module):
    """Full attention, with dropout on the probabilities when `drop` is active.

    The library kernels draw their own mask; a counter-based one needs the probabilities, so that path is written out.
    """

    def __init__(self, drop: Dropout):
        super().__init__()
        self.drop, self.attention = drop, Attention()

    def forward(self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, seed_B: Tensor | None) -> Tensor:
        if not self.drop.active(seed_B):
            return self.attention(q_BHTK, k_BHSK, v_BHSK)
        scores = torch.matmul(q_BHTK, k_BHSK.transpose(-1, -2)) * q_BHTK.shape[-1] ** -0.5
        probabilities = self.drop(scores.softmax(-1, dtype=torch.float32).to(v_BHSK.dtype), seed_B)
        return torch.matmul(probabilities, v_BHSK)
