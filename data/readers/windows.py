"""Rows around a frame: offsets clamped to the episode, and which of them had to be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def window(frame: int, offsets: Sequence[int], length: int) -> tuple[np.ndarray, np.ndarray]:
    """(frames, is_pad): int64 and bool, one an offset, for `frame` of an episode with `length` frames.

    A frame before the episode's first or after its last is replaced by that one and marked as padding.
    """
    steps, lowest, highest = _steps(tuple(offsets))
    wanted = frame + steps
    if frame + lowest >= 0 and frame + highest < length:  # most windows: nothing to clamp
        return wanted, np.zeros(len(steps), bool)
    inside = np.minimum(np.maximum(wanted, 0), length - 1)
    return inside, inside != wanted


@lru_cache(maxsize=64)
def _steps(offsets: tuple[int, ...]) -> tuple[np.ndarray, int, int]:
    """The offsets as int64, their lowest and their highest."""
    return np.asarray(offsets, np.int64), min(offsets), max(offsets)
