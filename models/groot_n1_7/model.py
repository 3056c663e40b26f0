"""GR00T N1.7: Qwen3-VL up to its 16th layer, context self-attention, and the GR00T head.

Facts: NVIDIA/Isaac-GR00T ``qwen3_backbone.py``: the features are the last kept layer's output BEFORE the final norm.

Axes: B samples, V views, L tokens, C width of the language model.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Field
from vlaforge.models.base import BlockGroup
from vlaforge.models.groot.policy import Embedded, GrootPolicy, patches_of
from vlaforge.models.groot_n1_7.config import ModelConfig
from vlaforge.models.towers.qwen3 import Qwen3, place_images
from vlaforge.models.towers.qwen3_vision import Qwen3Vision


class Model(GrootPolicy):
    """Adds field `positions` [B, 3, L]: M-RoPE's time, row and column, made with the tokens.

    Instead of `images` a batch may hold `patches` [B, V, N, 3·frames·patch²] and `grids` [B, V, 2] (rows, columns of
    patches; 0 for an absent view): views of several sizes, padded to N.
    """

    family = "groot_n1_7"
    config: ModelConfig
    positions_axes: ClassVar[int | None] = 2

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.vision = Qwen3Vision(config.vision)
        self.language = Qwen3(config.text)
        self.freeze()
        # The features are read in front of the final norm: nothing reads its weight.
        self.language.norm.requires_grad_(False)

    @classmethod
    def vocabulary(cls, config: ModelConfig) -> int:
        return config.text.vocab_size

    @classmethod
    def backbone_fields(cls, config: ModelConfig) -> dict[str, Field]:
        return {"positions": Field((3, config.max_token_len), torch.int64, "PL", 0, config.max_token_len)}

    def embed(self, batch: Batch) -> Embedded:
        tokens_BL = batch["tokens"]
        patches_MNP, grid, padded = patches_of(batch, self.vision, self.prepare)
        merged_MJC, deepstack = self.vision(patches_MNP, grid, padded)
        b = tokens_BL.shape[0]
        valid_BF = grid.valid_MN[:, :: self.config.vision.merge**2].reshape(b, -1) if padded else None
        image_BL = tokens_BL == self.config.image_token
        x_BLC = self.language.tokens(tokens_BL)

        def place(onto: Tensor, features_MJC: Tensor) -> Tensor:
            return place_images(onto, features_MJC.reshape(b, -1, features_MJC.shape[-1]), image_BL, valid_BF)

        added = [place(torch.zeros_like(x_BLC), features) for features in deepstack]
        return Embedded(place(x_BLC, merged_MJC), image_BL, None if padded else self.image_tokens, added)

    @property
    def frozen_layers(self) -> int:
        # DeepStack's outputs are added behind the first layers: those run together or not at all.
        layers = super().frozen_layers
        return layers if layers >= len(self.config.vision.deepstack) else 0

    def backbone_blocks(self) -> list[BlockGroup]:
        return [
            BlockGroup("vision.blocks", tuple(f"vision.blocks.{i}" for i in range(self.config.vision.layers))),
            BlockGroup("language.layers", tuple(f"language.layers.{i}" for i in range(self.config.text.layers))),
        ]

    def towers(self) -> dict[str, list[str]]:
        return {"vision": ["vision"], "language": ["language"], "backbone": ["vision", "language"], "expert": ["head"]}
