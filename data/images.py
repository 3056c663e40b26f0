"""Image geometry and colour in torch: the plain CPU paths of the published recipes, and one fused pass for
the device.

Axes: N images, C = 3 channels, H, W pixels. Frames are uint8 [N, H, W, 3]; model inputs float [N, 3, H, W].

A `Placement` says where an output pixel looks in the source frame, so crop, resize, pad and rotation of one
image are a single sampling, not four. Its 16 numbers travel with the frame; `sample_views` is that pass in
torch, the specification of any fused kernel, and gives the same numbers on the CPU and on a device.
Coordinates are (x, y).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.data.errors import UserError

Anchor = Literal["centre", "end"]

PARAMS = (
    *("mxx", "mxy", "myx", "myy", "px", "py", "qx", "qy"),
    *("left", "top", "right", "bottom"),
    *("brightness", "contrast", "pivot", "saturation"),
)
"""The columns of a placement as a float32 vector (see `Placement`)."""


def fit(height: int, width: int, out_height: int, out_width: int) -> tuple[int, int]:
    """The largest (height, width) of the same aspect inside the output; rounded down, at least one pixel."""
    ratio = max(width / out_width, height / out_height)
    return max(1, int(height / ratio)), max(1, int(width / ratio))


def margins(inner: int, outer: int, anchor: Anchor) -> tuple[int, int]:
    """(before, after) padding; centred with the odd pixel after, or all of it before ("end": the image ends
    there).
    """
    free = outer - inner
    return (free // 2, free - free // 2) if anchor == "centre" else (free, 0)


def resize_with_pad(x: Tensor, height: int, width: int, *, value: float = 0.0, anchor: Anchor = "centre") -> Tensor:
    """Aspect-keeping bilinear resize without antialiasing, then padding by `value`. x [N, C, H, W], any
    float or uint8.

    Float input in [0, 1] with value 0 is the float path of LeRobot's π0.5, and in [-1, 1] with value -1 that
    of OpenPI; uint8 input rounds as OpenPI's uint8 path; anchor ``end`` is X-VLA's padding at the left and
    top.
    """
    inner_h, inner_w = fit(*x.shape[-2:], height, width)
    x = F.interpolate(x, size=(inner_h, inner_w), mode="bilinear", align_corners=False)
    left, right = margins(inner_w, width, anchor)
    top, bottom = margins(inner_h, height, anchor)
    return F.pad(x, (left, right, top, bottom), value=value)


def resize_with_pad_pil(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3] → uint8 [height, width, 3]: Pillow's bilinear (antialiased when shrinking), centred on
    black.

    This is what OpenPI's data transform and its policy client do; it differs visibly from `resize_with_pad`
    when an image shrinks. Returns the input when it has the size already.
    """
    from PIL import Image  # here, since nothing else of the models needs Pillow

    if image.shape[:2] == (height, width):
        return image
    inner_h, inner_w = fit(*image.shape[:2], height, width)
    out = np.zeros((height, width, image.shape[2]), np.uint8)
    top, left = margins(inner_h, height, "centre")[0], margins(inner_w, width, "centre")[0]
    resized = Image.fromarray(image).resize((inner_w, inner_h), Image.Resampling.BILINEAR)
    out[top : top + inner_h, left : left + inner_w] = np.asarray(resized)
    return out


def to_float(frames_NHWC: Tensor) -> Tensor:
    """uint8 [N, H, W, 3] → float32 [N, 3, H, W] in [0, 1]."""
    return frames_NHWC.permute(0, 3, 1, 2).to(torch.float32) / 255.0


@dataclass(frozen=True)
class Placement:
    """How the output of `size` (height, width) samples its source, and its colour change.

    With o an output pixel and s its source position, both (x, y) pixel indices:
    ``s = matrix @ (o + 0.5 - p) + q - 0.5``. Outside `rect` (left, top, right, bottom; source pixels, right
    and bottom exclusive) the output is padding; inside, samples repeat the rect's border. Colour, on [0, 1]:
    ``v·brightness``; then contrast about `pivot`; then saturation about the mean of the channels; then
    clamped.
    """

    size: tuple[int, int]
    rect: tuple[float, float, float, float]
    matrix: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 1.0)
    p: tuple[float, float] = (0.0, 0.0)
    q: tuple[float, float] = (0.0, 0.0)
    colour: tuple[float, float, float, float] = (1.0, 1.0, 0.5, 1.0)

    @classmethod
    def whole(cls, height: int, width: int) -> Placement:
        """The source as it is."""
        return cls((height, width), (0.0, 0.0, float(width), float(height)))

    def source(self, x: float, y: float) -> tuple[float, float]:
        """Source position of an output position, both measured from the corner of pixel 0 (not from its
        centre).
        """
        a, b, c, d = self.matrix
        x, y = x - self.p[0], y - self.p[1]
        return a * x + b * y + self.q[0], c * x + d * y + self.q[1]

    def crop(self, left: int, top: int, height: int, width: int) -> Placement:
        """The output's window that starts at (left, top). ValueError after a rotation, or out of range."""
        if self.matrix[1] or self.matrix[2]:
            raise ValueError("crop before rotating: the window of a rotated image is no rectangle of the source")
        if min(left, top) < 0 or top + height > self.size[0] or left + width > self.size[1]:
            raise ValueError(f"crop {height}×{width} at ({left}, {top}) leaves the image {self.size}")
        x0, y0 = self.source(left, top)
        x1, y1 = self.source(left + width, top + height)
        l, t, r, b = self.rect
        rect = (max(l, x0), max(t, y0), min(r, x1), min(b, y1))
        return replace(self, size=(height, width), rect=rect, p=(0.0, 0.0), q=(x0, y0))

    def resize(self, height: int, width: int) -> Placement:
        sx, sy = self.size[1] / width, self.size[0] / height
        a, b, c, d = self.matrix
        p = (self.p[0] / sx, self.p[1] / sy)
        return replace(self, size=(height, width), matrix=(a * sx, b * sy, c * sx, d * sy), p=p)

    def pad(self, left: int, top: int, height: int, width: int) -> Placement:
        """Puts the output into a larger one, at (left, top)."""
        return replace(self, size=(height, width), p=(self.p[0] + left, self.p[1] + top))

    def rotate(self, degrees: float) -> Placement:
        """Turns the content counter-clockwise about the output's centre; the corners become padding."""
        angle = np.deg2rad(degrees)
        cos, sin = float(np.cos(angle)), float(np.sin(angle))
        a, b, c, d = self.matrix
        centre = (self.size[1] / 2, self.size[0] / 2)
        # y points down, so content that turns counter-clockwise is sampled at matrix @ [[cos, -sin], [sin,
        # cos]].
        turned = (a * cos + b * sin, b * cos - a * sin, c * cos + d * sin, d * cos - c * sin)
        return replace(self, matrix=turned, p=centre, q=self.source(*centre))

    def inverse(self, source_size: tuple[int, int]) -> Placement:
        """Samples this output so that the source comes back; what was cut off is padding. Colour stays."""
        a, b, c, d = self.matrix
        det = a * d - b * c
        height, width = self.size
        inverse = (d / det, -b / det, -c / det, a / det)
        return Placement(source_size, (0.0, 0.0, float(width), float(height)), inverse, self.q, self.p)

    def vector(self) -> np.ndarray:
        """float32 [16] in the order of `PARAMS`."""
        return np.array([*self.matrix, *self.p, *self.q, *self.rect, *self.colour], np.float32)


def sample_views(
    frames_NHWC: Tensor,
    params_NP: Tensor,
    size: tuple[int, int],
    *,
    low: float = -1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The fused pass: frames of 0 to 255 (uint8 or float32) [N, H, W, 3] and float32 [N, 16] → [N, 3, *size] of
    `dtype`, values in [low, 1].

    One bilinear sampling per output pixel (all geometry at once), colour, range, cast; padding has the value
    `low`. With the placement of a plain resize-with-pad it equals ``resize_with_pad(x / 255) * (1 - low) +
    low`` up to float rounding.
    """
    if frames_NHWC.dtype not in (torch.uint8, torch.float32) or params_NP.shape != (frames_NHWC.shape[0], len(PARAMS)):
        raise UserError(
            f"sample_views takes uint8 [N, H, W, 3] and float32 [N, {len(PARAMS)}], not {frames_NHWC.dtype} "
            f"{list(frames_NHWC.shape)} and {list(params_NP.shape)}."
        )
    (out_h, out_w), device = size, frames_NHWC.device
    mxx, mxy, myx, myy, px, py, qx, qy, left, top, right, bottom, *colour = (
        column[:, None, None] for column in params_NP.to(torch.float32).unbind(1)
    )
    x = torch.arange(out_w, device=device, dtype=torch.float32)[None, None, :] + 0.5 - px
    y = torch.arange(out_h, device=device, dtype=torch.float32)[None, :, None] + 0.5 - py
    sx, sy = mxx * x + mxy * y + (qx - 0.5), myx * x + myy * y + (qy - 0.5)
    inside = (sx >= left - 0.5) & (sx < right - 0.5) & (sy >= top - 0.5) & (sy < bottom - 0.5)
    values = _bilinear(frames_NHWC, sx, sy, left.ceil(), top.ceil(), right.floor() - 1, bottom.floor() - 1)
    values = _colour(values, *(c[..., None] for c in colour))
    values = torch.where(inside[..., None], values * (1.0 - low) + low, values.new_tensor(low))
    return values.permute(0, 3, 1, 2).to(dtype)


def _bilinear(frames: Tensor, sx: Tensor, sy: Tensor, left, top, right, bottom) -> Tensor:
    """[N, h, w, 3] in [0, 1] at the positions; those beyond the (inclusive) bounds repeat the border."""
    sx, sy = torch.minimum(torch.maximum(sx, left), right), torch.minimum(torch.maximum(sy, top), bottom)
    x0, y0 = sx.floor(), sy.floor()
    fx, fy = (sx - x0)[..., None], (sy - y0)[..., None]
    x1, y1 = torch.minimum(x0 + 1, right), torch.minimum(y0 + 1, bottom)
    height, width = frames.shape[1:3]
    flat = frames.reshape(frames.shape[0], height * width, 3)

    def tap(y: Tensor, x: Tensor) -> Tensor:
        index = (y * width + x).to(torch.int64).reshape(frames.shape[0], -1, 1).expand(-1, -1, 3)
        return flat.gather(1, index).reshape(*sx.shape, 3).to(torch.float32) / 255.0

    upper = tap(y0, x0) * (1 - fx) + tap(y0, x1) * fx
    lower = tap(y1, x0) * (1 - fx) + tap(y1, x1) * fx
    return upper * (1 - fy) + lower * fy


def _colour(v: Tensor, brightness: Tensor, contrast: Tensor, pivot: Tensor, saturation: Tensor) -> Tensor:
    """Written so that factors of 1 change nothing, bit for bit."""
    v = v * brightness
    v = v + (pivot - v) * (1 - contrast)
    grey = v.mean(-1, keepdim=True)
    v = v + (grey - v) * (1 - saturation)
    return v.clamp(0.0, 1.0)
