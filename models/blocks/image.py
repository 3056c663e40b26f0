"""Camera frames → model input, on the device: resize with padding, and the range [-1, 1].

Axes: B samples, V views, H W pixels of the camera, S side of the model's input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def resize_with_pad(x_NCHW: Tensor, size: int) -> Tensor:
    """Floats in [0, 1] → [N, C, S, S]: aspect kept, bilinear without antialiasing, centred on zeros.

    The odd pixel of padding goes to the right and the bottom. This is the float path of LeRobot's π0.5.
    """
    height, width = x_NCHW.shape[-2:]
    if (height, width) == (size, size):
        return x_NCHW
    ratio = max(width / size, height / size)
    inner_h, inner_w = int(height / ratio), int(width / ratio)
    x_NCHW = F.interpolate(x_NCHW, size=(inner_h, inner_w), mode="bilinear", align_corners=False).clamp(0.0, 1.0)
    left, top = (size - inner_w) // 2, (size - inner_h) // 2
    return F.pad(x_NCHW, (left, size - inner_w - left, top, size - inner_h - top))


class PrepareImages(nn.Module):
    """The images of a batch as [B·V, 3, S, S] in [-1, 1], in `dtype`.

    Takes what the data side ships: raw frames [B, V, H, W, 3] with values 0 to 255 (uint8, or float where cameras were
    brought to one size without rounding), or [B, V, 3, S, S] that is ready.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if images.shape[-1] == 3:
            frames_NCHW = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
            return (resize_with_pad(frames_NCHW, self.size) * 2.0 - 1.0).to(dtype)
        if images.shape[-2:] != (self.size, self.size) or not images.is_floating_point():
            raise ValueError(
                f"images have shape {tuple(images.shape)} and dtype {images.dtype}; expected frames [B, V, H, W, 3] of "
                f"0 to 255, or [B, V, 3, {self.size}, {self.size}] floats in [-1, 1]"
            )
        return images.flatten(0, 1).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.size}"
