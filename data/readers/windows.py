"""Rows around a frame: offsets clamped to the episode, and which of them had to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def window(frame: int, offsets: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(frames, is_pad): int64 and bool, one an offset, for `frame` of an episode with `length` frames.

    A frame before the episode's first or after its last is replaced by that one and marked as padding.
    """
    wanted = frame + np.asarray(offsets, np.int64)
    inside = np.clip(wanted, 0, length - 1)
    return inside, inside != wanted
