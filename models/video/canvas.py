"""Several cameras on one canvas, on the device: raw uint8 frames → one video in [-1, 1].

Each camera is scaled until it covers its slot (bilinear, antialiased, in float) and cropped at the centre, as the
official data transforms do.

Axes: B samples, V cameras, T frames, H W pixels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.data.errors import UserError

LAYOUTS = ("row", "head_over_wrists")


class Slot(NamedTuple):
    """A camera's rectangle on the canvas, pixels."""

    top: int
    left: int
    height: int
    width: int


def slots(layout: str, views: int, height: int, width: int) -> list[Slot]:
    """Where each camera goes. A single view always takes the whole canvas.

    ``row``: side by side, equal widths. ``head_over_wrists``: the first over two thirds of the height, two more half as
    wide below it. UserError when `views` or the size do not fit the layout.
    """
    if views == 1:
        return [Slot(0, 0, height, width)]
    if layout == "row":
        if width % views:
            raise UserError(
                f"A canvas {width} pixels wide cannot be shared by {views} cameras: choose another model.width."
            )
        each = width // views
        return [Slot(0, view * each, height, each) for view in range(views)]
    if views != 3 or height % 3 or width % 2:
        raise UserError(
            f"model.layout {layout} takes three cameras (head, left wrist, right wrist), a height divisible by 3 and "
            f"an even width; there are {views} cameras and a canvas of {height} x {width}."
        )
    top = height * 2 // 3
    return [Slot(0, 0, top, width), *(Slot(top, side * width // 2, height - top, width // 2) for side in (0, 1))]


def cover(x_NCHW: Tensor, height: int, width: int) -> Tensor:
    """Floats scaled to cover height × width with the aspect kept, then cropped at the centre."""
    h, w = x_NCHW.shape[-2:]
    if (h, w) != (height, width):
        scale = max(height / h, width / w)
        size = max(height, int(h * scale)), max(width, int(w * scale))
        x_NCHW = F.interpolate(x_NCHW, size=size, mode="bilinear", align_corners=False, antialias=True)
        top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
        x_NCHW = x_NCHW[..., top : top + height, left : left + width]
    return x_NCHW


def compose(images_BVTHWC: Tensor, layout: str, height: int, width: int) -> Tensor:
    """uint8 frames [B, V, T, h, w, 3] → float32 [B, 3, T, height, width] in [-1, 1]."""
    b, v, t = images_BVTHWC.shape[:3]
    canvas = torch.empty(b * t, 3, height, width, device=images_BVTHWC.device)
    for view, slot in enumerate(slots(layout, v, height, width)):
        frames = images_BVTHWC[:, view].flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        place = canvas[:, :, slot.top : slot.top + slot.height, slot.left : slot.left + slot.width]
        place.copy_(cover(frames, slot.height, slot.width))
    return ((canvas - 0.5) / 0.5).unflatten(0, (b, t)).transpose(1, 2)
