"""GR00T N1.6's prompt: Eagle's chat template, the text before the numbered images."""

from __future__ import annotations

from vlaforge.models.groot.processing import GrootProcessing, Piece
from vlaforge.models.groot_n1_6.config import EMBODIMENTS

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.\n<|im_end|>\n"
"""What Eagle's processor writes in front of a conversation that has no system message."""


class Processing(GrootProcessing):
    image_word = "<IMG_CONTEXT>"
    embodiments = EMBODIMENTS

    def prompt(self, text: str) -> list[Piece]:
        # Text and what follows it up to the first special token are encoded together: they may share tokens.
        pieces: list[Piece] = [f"{SYSTEM}<|im_start|>user\n{text}<image 1><img>", self.view_tokens]
        for view in range(2, self.model.num_views + 1):
            pieces += [f"</img><image {view}><img>", self.view_tokens]
        return [*pieces, "</img><|im_end|>\n"]
