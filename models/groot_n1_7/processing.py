"""GR00T N1.7's prompt: Qwen3-VL's chat template, the images before the text, and M-RoPE positions."""

from __future__ import annotations

import numpy as np

from vlaforge.models.groot.processing import GrootProcessing, Piece
from vlaforge.models.groot_n1_7.config import EMBODIMENTS, ModelConfig
from vlaforge.models.groot_n1_7.positions import multimodal_positions


class Processing(GrootProcessing):
    image_word = "<|image_pad|>"
    embodiments = EMBODIMENTS
    model: ModelConfig

    def prompt(self, text: str) -> list[Piece]:
        pieces: list[Piece] = ["<|im_start|>user\n"]
        for _ in range(self.model.num_views):
            pieces += ["<|vision_start|>", self.view_tokens, "<|vision_end|>"]
        return [*pieces, f"{text}<|im_end|>\n"]

    def extra(self, tokens_L: np.ndarray, mask_L: np.ndarray) -> dict[str, np.ndarray]:
        grids = [self.grid] * self.model.num_views
        return {"positions": multimodal_positions(tokens_L, mask_L, grids, self.model)}
