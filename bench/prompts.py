"""Synthetic prompts whose image tokens stand among the words, as a family's own data side would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlaforge.models import Family

OPENING = 4
"""Words before the first image: a chat template's."""


def write_prompts(chosen: Family, config: Any, batch: Mapping[str, Tensor], words: Sequence[int]) -> None:
    """Overwrites `tokens`, `token_mask` and `positions` of a batch, padded on the left (GR00T N1.7).

    Args:
        words: for each sample, how many words follow the images; samples beyond the list take it from the front again.
    """
    grid = config.image_size // config.vision.patch
    merged = (grid // config.vision.merge) ** 2
    image = [config.vision_start_token, *[config.image_token] * merged, config.vision_end_token]
    positions_of = chosen.part("positions").multimodal_positions
    batch["token_mask"].fill_(False)
    for row in range(batch["tokens"].shape[0]):
        tokens_L, mask_L = batch["tokens"][row], batch["token_mask"][row]
        special = (config.image_token, config.vision_start_token, config.vision_end_token)
        text = torch.randint(3, min(special), (OPENING + words[row % len(words)],),
                             generator=torch.Generator().manual_seed(row)).tolist()  # fmt: skip
        prompt = [*text[:OPENING], *image * config.num_views, *text[OPENING:]]
        tokens_L[:-len(prompt)], tokens_L[-len(prompt):] = 0, torch.tensor(prompt)
        mask_L[-len(prompt):] = True
        grids = [(grid, grid)] * config.num_views
        made = positions_of(np.asarray(tokens_L), np.asarray(mask_L), grids, config)
        batch["positions"][row] = torch.from_numpy(made)
