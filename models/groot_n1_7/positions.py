"""M-RoPE positions of a prompt with images, on the data side (numpy), so that no step computes them.

Facts: transformers ``models/qwen3_vl``. Text advances time, row and column together; an image's tokens
share one time and count rows and columns from there; what follows starts behind the largest number so far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlaforge.models.groot_n1_7.config import ModelConfig


def multimodal_positions(
    tokens_L: np.ndarray, mask_L: np.ndarray, grids: Sequence[Sequence[int]], config: ModelConfig
) -> np.ndarray:
    """int64 [3, L]: time, row and column of every token; padding has 0.

    Args:
        tokens_L, mask_L: ids and validity, padded on the left.
        grids: (rows, columns) of patches of each image, in order; absent ones have 0 rows.
    """
    merge = config.vision.merge
    out = np.zeros((3, len(tokens_L)), np.int64)
    valid = np.flatnonzero(mask_L)
    sizes = iter([(rows // merge, columns // merge) for rows, columns in grids if rows])
    at, place = 0, 0
    while place < len(valid):
        if tokens_L[valid[place]] != config.image_token:
            out[:, valid[place]] = at
            at, place = at + 1, place + 1
            continue
        rows, columns = next(sizes)
        where = valid[place : place + rows * columns]
        row, column = np.divmod(np.arange(len(where)), columns)
        out[:, where] = at + np.stack([np.zeros_like(row), row, column])
        at, place = at + max(rows, columns), place + rows * columns
    return out
