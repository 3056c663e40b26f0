"""GR00T's image transform, and its form of a task.

Facts: NVIDIA/Isaac-GR00T ``processing_gr00t_n1d6.py``; LeRobot 0.6.1 ``processor_groot.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def formalize(task: str) -> str:
    """Lower case, without anything but letters, digits, underscores and white space."""
    return re.sub(r"[^\w\s]", "", task.lower())


@dataclass(frozen=True)
class ImageTransform:
    """Frame → square of `size`: (pad to a square), resize to a square of `edge`, crop, resize. Aspects are not kept.

    All resizes are antialiased bicubic on bytes, as the official torch path does them.
    """

    size: int
    edge: int | None = None
    crop: float | None = None
    letter_box: bool = False

    def __call__(self, frame_HWC: np.ndarray, at: tuple[float, float] = (0.5, 0.5)) -> np.ndarray:
        """uint8 [H, W, 3] → uint8 [size, size, 3]; `at` (y, x) in [0, 1] places the crop."""
        x_CHW = torch.from_numpy(np.ascontiguousarray(frame_HWC)).permute(2, 0, 1)
        if self.letter_box:
            x_CHW = _square(x_CHW)
        x_CHW = _resize(x_CHW, self.edge or self.size)
        if self.crop is not None and self.crop < 1.0:
            x_CHW = _crop(x_CHW, max(1, round(x_CHW.shape[-1] * self.crop)), at)
        return _resize(x_CHW, self.size).permute(1, 2, 0).contiguous().numpy()


def _square(x_CHW: Tensor) -> Tensor:
    height, width = x_CHW.shape[-2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    return F.pad(x_CHW, (left, side - width - left, top, side - height - top))


def _resize(x_CHW: Tensor, side: int) -> Tensor:
    if tuple(x_CHW.shape[-2:]) == (side, side):
        return x_CHW
    return F.interpolate(x_CHW[None], size=(side, side), mode="bicubic", antialias=True)[0]


def _crop(x_CHW: Tensor, side: int, at: tuple[float, float]) -> Tensor:
    free = x_CHW.shape[-1] - side
    # The centre is rounded down, as officially.
    top, left = (free // 2 if place == 0.5 else round(free * place) for place in at)
    return x_CHW[:, top : top + side, left : left + side]
