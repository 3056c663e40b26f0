"""GR00T's image transforms, and its form of a task.

Facts: NVIDIA/Isaac-GR00T ``processing_gr00t_n1d6.py``, ``image_augmentations.py``, ``processing_eagle3_vl.py``; LeRobot
0.6.1 ``processor_groot.py``; transformers' ``smart_resize``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import ModuleType

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
    """Frame → `size` (height, width): (pad to a square), resize to `edge`, crop, resize, (turn).

    Path ``torch`` resizes to a square of `edge` (default: the height), not keeping aspects: antialiased bicubic on
    bytes. A turn takes the nearest pixel, and what comes from outside is black.
    Path ``albumentations`` keeps the aspect: the shorter side becomes `edge`, by area interpolation, after the crop
    again; a turn is linear, mirrored at the edges; the backbone's image processor then rounds both sides to whole
    patches.
    """

    size: tuple[int, int]
    edge: int | None = None
    crop: float | None = None
    letter_box: bool = False
    path: str = "torch"

    def __call__(
        self, frame_HWC: np.ndarray, at: tuple[float, float] = (0.5, 0.5), degrees: float = 0.0
    ) -> np.ndarray:
        """uint8 [H, W, 3] → uint8 [*size, 3]; `at` (y, x) in [0, 1] places the crop, `degrees` turn the result
        counter-clockwise."""
        frame = _square(frame_HWC) if self.letter_box else frame_HWC
        if self.path == "albumentations":
            return _bicubic(turn_mirrored(self._areas(frame, at), degrees), self.size)
        return turn_black(_bicubic(self._squares(frame, at), self.size), degrees)

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


def _opencv() -> ModuleType:
    try:
        import cv2
    except ImportError as error:
        raise UserError(
            "data.image_path=albumentations resizes with OpenCV: pip install 'vlaforge[opencv]'."
        ) from error
    return cv2


def _shorter_side(frame_HWC: np.ndarray, edge: int) -> np.ndarray:
    cv2 = _opencv()
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


def turn_black(frame_HWC: np.ndarray, degrees: float) -> np.ndarray:
    """As torchvision's RandomRotation: the nearest pixel, 0 from outside. Places are rounded in its order, in fp32."""
    if not degrees:
        return frame_HWC
    height, width = frame_HWC.shape[:2]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    half_2 = torch.tensor([0.5 * width, 0.5 * height])
    turn_22 = torch.tensor([[cos, sin], [-sin, cos]]) / half_2
    rows_H, columns_W = (torch.linspace(0.5 - 0.5 * n, 0.5 * n - 0.5, n) for n in (height, width))
    place_HW2 = torch.stack(torch.meshgrid(columns_W, rows_H, indexing="xy"), -1) @ turn_22
    x_1CHW = torch.from_numpy(np.ascontiguousarray(frame_HWC)).permute(2, 0, 1)[None].float()
    turned = F.grid_sample(x_1CHW, place_HW2[None], mode="nearest", padding_mode="zeros", align_corners=False)
    return turned[0].to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def turn_mirrored(frame_HWC: np.ndarray, degrees: float) -> np.ndarray:
    """As Albumentations' Rotate (1.4.18, which is pinned officially): linear, mirrored without repeating the edge."""
    if not degrees:
        return frame_HWC
    cv2 = _opencv()
    height, width = frame_HWC.shape[:2]
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, 1.0)
    how = {"flags": cv2.INTER_LINEAR, "borderMode": cv2.BORDER_REFLECT_101}
    return cv2.warpAffine(np.ascontiguousarray(frame_HWC), matrix, (width, height), **how)
