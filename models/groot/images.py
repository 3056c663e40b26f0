"""GR00T's image transforms, and its form of a task.

Facts: NVIDIA/Isaac-GR00T ``processing_gr00t_n1d6.py``, ``image_augmentations.py``, ``processing_eagle3_vl.py``; LeRobot
0.6.1 ``processor_groot.py``; transformers' ``smart_resize``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vlaforge.data.errors import UserError

PATHS = ("torch", "albumentations")


def formalize(task: str) -> str:
    """Lower case, without anything but letters, digits, underscores and white space."""
    return re.sub(r"[^\w\s]", "", task.lower())


@dataclass(frozen=True)
class ImageTransform:
    """Frame → `size` (height, width): (pad to a square), resize to `edge`, crop, resize.

    Path ``torch`` resizes to a square of `edge` (default: the height), not keeping aspects: antialiased bicubic on
    bytes.
    Path ``albumentations`` keeps the aspect: the shorter side becomes `edge`, by area interpolation, after the crop
    again; the backbone's image processor then rounds both sides to whole patches.
    """

    size: tuple[int, int]
    edge: int | None = None
    crop: float | None = None
    letter_box: bool = False
    path: str = "torch"

    def __call__(self, frame_HWC: np.ndarray, at: tuple[float, float] = (0.5, 0.5)) -> np.ndarray:
        """uint8 [H, W, 3] → uint8 [*size, 3]; `at` (y, x) in [0, 1] places the crop."""
        frame = _square(frame_HWC) if self.letter_box else frame_HWC
        return _bicubic((self._areas if self.path == "albumentations" else self._squares)(frame, at), self.size)

    def natural(self, height: int, width: int, multiple: int) -> tuple[int, int]:
        """(height, width) that frames of a size should have in the model: `size` must be this."""
        if self.path == "torch":
            return self.size
        frame = np.zeros((height, width, 3), np.uint8)
        made = self._areas(_square(frame) if self.letter_box else frame, (0.5, 0.5))
        return tuple(max(multiple, round(side / multiple) * multiple) for side in made.shape[:2])

    @property
    def _edge(self) -> int:
        return self.edge or self.size[0]

    def _squares(self, frame_HWC: np.ndarray, at: tuple[float, float]) -> np.ndarray:
        frame = _bicubic(frame_HWC, (self._edge, self._edge))
        if self.crop is None or self.crop >= 1.0:
            return frame
        side = max(1, round(self._edge * self.crop))
        return _crop(frame, side, side, at)

    def _areas(self, frame_HWC: np.ndarray, at: tuple[float, float]) -> np.ndarray:
        frame = _shorter_side(frame_HWC, self._edge)
        if self.crop is None or self.crop >= 1.0:
            return frame
        height, width = (max(1, int(side * self.crop)) for side in frame.shape[:2])
        return _shorter_side(_crop(frame, height, width, at), self._edge)


def _square(frame_HWC: np.ndarray) -> np.ndarray:
    """Black bars on both sides; the odd row or column at the end."""
    height, width = frame_HWC.shape[:2]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    return np.pad(frame_HWC, ((top, side - height - top), (left, side - width - left), (0, 0)))


def _bicubic(frame_HWC: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame_HWC.shape[:2] == tuple(size):
        return frame_HWC
    x_1CHW = torch.from_numpy(np.ascontiguousarray(frame_HWC)).permute(2, 0, 1)[None]
    resized = F.interpolate(x_1CHW, size=size, mode="bicubic", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def _shorter_side(frame_HWC: np.ndarray, edge: int) -> np.ndarray:
    try:
        import cv2
    except ImportError as error:
        raise UserError(
            "data.image_path=albumentations resizes with OpenCV: pip install 'vlaforge[opencv]'."
        ) from error
    height, width = frame_HWC.shape[:2]
    if min(height, width) == edge:
        return frame_HWC
    scale = edge / min(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return cv2.resize(np.ascontiguousarray(frame_HWC), size, interpolation=cv2.INTER_AREA)


def _crop(frame_HWC: np.ndarray, height: int, width: int, at: tuple[float, float]) -> np.ndarray:
    free = (frame_HWC.shape[0] - height, frame_HWC.shape[1] - width)
    # The centre is rounded down, as officially.
    top, left = (space // 2 if place == 0.5 else round(space * place) for space, place in zip(free, at))
    return frame_HWC[top : top + height, left : left + width]
