"""GR00T N1.6: Eagle's SigLIP-2 and Qwen3 up to its 16th layer, and the GR00T head.

Facts: NVIDIA/Isaac-GR00T ``eagle_backbone.py``: the features are the last kept layer's output AFTER the final norm.

Axes: B samples, V views, L tokens, C width of the language model.
"""

from __future__ import annotations

from torch import Tensor

from vlaforge.data.schema import Batch
from vlaforge.models.base import BlockGroup
from vlaforge.models.groot.policy import Embedded, GrootPolicy, patches_of
from vlaforge.models.groot_n1_6.config import ModelConfig
from vlaforge.models.towers.qwen3 import Qwen3, place_images
from vlaforge.models.towers.siglip2 import PixelShuffleProjector, Siglip2


class Model(GrootPolicy):
    """Positions are the columns of the padded text, as published.

    Instead of `images` a batch may hold `patches` [B, V, N, 3·patch²] and `grids` [B, V, 2]: views of several sizes.
    """

    family = "groot_n1_6"
    config: ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.vision = Siglip2(config.vision)
        self.projector = PixelShuffleProjector(config.vision.width, config.vision.merge, config.text.width)
        self.language = Qwen3(config.text)
        self.freeze()

    @classmethod
    def vocabulary(cls, config: ModelConfig) -> int:
        return config.text.vocab_size

    def embed(self, batch: Batch) -> Embedded:
        tokens_BL = batch["tokens"]
        patches_MNP, grid, padded = patches_of(batch, self.vision, self.prepare)
        features_MJC = self.projector(self.vision(patches_MNP, grid, padded))
        b = tokens_BL.shape[0]
        valid_BF = grid.valid_MN[:, :: self.config.vision.merge**2].reshape(b, -1) if padded else None
        image_BL = tokens_BL == self.config.image_token
        features_BFC = features_MJC.reshape(b, -1, features_MJC.shape[-1])
        x_BLC = place_images(self.language.tokens(tokens_BL), features_BFC, image_BL, valid_BF)
        return Embedded(x_BLC, image_BL, None if padded else self.image_tokens)

    def finish(self, hidden_BLC: Tensor) -> Tensor:
        return self.language.norm(hidden_BLC)

    def backbone_blocks(self) -> list[BlockGroup]:
        return [
            BlockGroup("vision.layers", tuple(f"vision.layers.{i}" for i in range(self.config.vision.layers))),
            BlockGroup("language.layers", tuple(f"language.layers.{i}" for i in range(self.config.text.layers))),
        ]

    def towers(self) -> dict[str, list[str]]:
        backbone = ["vision", "projector", "language"]
        return {"vision": backbone[:2], "language": ["language"], "backbone": backbone, "expert": ["head"]}
