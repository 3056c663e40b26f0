"""Text caches that FastWAM's own scripts write, read without running anything in them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from vlaforge.data.errors import UserError


class OfficialTextCache:
    """FastWAM's own text cache: ``<sha256 of the prompt>.t5_len128.wan22ti2v5b.pt`` with `context` and `mask`.

    Args:
        folder: of the files.
        length, dim: L and D that every entry must have.
    """

    CONTEXT = ("context", "prompt_emb", "embedding")
    MASKS = ("mask", "context_mask", "attention_mask")

    def __init__(self, folder: Path | str, length: int, dim: int):
        self.folder, self.length, self.dim = Path(folder).expanduser(), length, dim
        if not self.folder.is_dir():
            raise UserError(f"data.text_cache '{self.folder}' is no folder.")
        self._read: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def text(self, name: str, prompt: str) -> tuple[np.ndarray, np.ndarray]:
        """(context float32 [L, D], mask bool [L]); rows outside the mask are zero. UserError when there is none."""
        if prompt not in self._read:
            self._read[prompt] = self._load(prompt)
        return self._read[prompt]

    def _load(self, prompt: str) -> tuple[np.ndarray, np.ndarray]:
        digest = hashlib.sha256(prompt.encode()).hexdigest()
        files = sorted(self.folder.glob(f"{digest}.t5_len{self.length}.*.pt"))
        if not files:
            raise UserError(f"Text cache '{self.folder}' has no {digest}.t5_len{self.length}.*.pt for {prompt!r}.")
        payload = torch.load(files[0], map_location="cpu", weights_only=True)
        context = next((payload[key] for key in self.CONTEXT if key in payload), None)
        mask = next((payload[key] for key in self.MASKS if key in payload), None)
        if context is None or mask is None or tuple(context.shape) != (self.length, self.dim):
            raise UserError(f"'{files[0]}' holds no context [{self.length}, {self.dim}] with a mask.")
        mask_L = mask.bool().numpy()
        return context.float().numpy() * mask_L[:, None], mask_L
