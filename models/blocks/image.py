"""Camera frames → model input, on the device: placement (resize, padding, augmentation) and the range [-1, 1].

Axes: B samples, V views, H W pixels of the camera, S side of the model's input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.data.images import resize_with_pad, sample_views

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Fit = Literal["resize", "pad_left_top"]


class PrepareImages(nn.Module):
    """The images of a batch as [B·V, 3, S, S] in [-1, 1], in `dtype`.

    Takes what the data side ships: raw frames [B, V, H, W, 3] with values 0 to 255 (uint8, or float where cameras were
    brought to one size without rounding), or [B, V, 3, S, S] that is ready. Raw frames are resized with their aspect
    kept, centred on black (the float path of LeRobot's π0.5), or sampled by `placements` float32 [B, V, 16]
    (`data.images.Placement`), which hold the augmentation of each view.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(
        self, images: Tensor, dtype: torch.dtype = torch.float32, placements: Tensor | None = None
    ) -> Tensor:
        if images.shape[-1] == 3:
            frames_NHWC = images.flatten(0, 1)
            if placements is not None:
                return sample_views(frames_NHWC, placements.flatten(0, 1), (self.size, self.size), dtype=dtype)
            x_NCHW = frames_NHWC.permute(0, 3, 1, 2).float() / 255.0
            if x_NCHW.shape[-2:] != (self.size, self.size):
                x_NCHW = resize_with_pad(x_NCHW, self.size, self.size)
            return (x_NCHW * 2.0 - 1.0).to(dtype)
        if images.shape[-2:] != (self.size, self.size) or not images.is_floating_point():
            raise ValueError(
                f"images have shape {tuple(images.shape)} and dtype {images.dtype}; expected frames [B, V, H, W, 3] of "
                f"0 to 255, or [B, V, 3, {self.size}, {self.size}] floats in [-1, 1]"
            )
        return images.flatten(0, 1).to(dtype)

    def extra_repr(self) -> str:
        return f"{self.size}"


class NormalizeImages(nn.Module):
    """The images of a batch as [B·V, 3, S, S] with mean and deviation of each colour taken out, in `dtype`.

    Takes raw frames [B, V, H, W, 3] with values 0 to 255, or [B, V, 3, S, S] that is ready. Raw frames are brought to
    the size by an antialiased bicubic `resize` that does not keep the aspect, or `pad_left_top`: an aspect-keeping
    bilinear one, then padding at the left and top with 0 in normalised space (LeRobot's option for X-VLA).

    Args:
        size: rows and columns of the output.
        mean, std: of each colour, for values in [0, 1].
        fit: how frames of another size are brought to it.
    """

    def __init__(
        self,
        size: tuple[int, int],
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        fit: Fit = "resize",
    ):
        super().__init__()
        self.size, self.fit = size, fit
        self.mean, self.std = tuple(mean), tuple(std)
        self.register_buffer("mean_C11", torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std_C11", torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        if images.shape[-1] != 3:
            if images.shape[-2:] != self.size or not images.is_floating_point():
                raise ValueError(
                    f"images have shape {tuple(images.shape)} and dtype {images.dtype}; expected frames "
                    f"[B, V, H, W, 3] of 0 to 255, or normalised floats [B, V, 3, {self.size[0]}, {self.size[1]}]"
                )
            return images.flatten(0, 1).to(dtype)
        x_NCHW = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        if self.fit == "resize" and x_NCHW.shape[-2:] != self.size:
            x_NCHW = F.interpolate(x_NCHW, size=self.size, mode="bicubic", antialias=True).clamp(0.0, 1.0)
        x_NCHW = (x_NCHW - self.mean_C11) / self.std_C11
        if self.fit == "pad_left_top":
            x_NCHW = resize_with_pad(x_NCHW, *self.size, value=0.0, anchor="end")
        return x_NCHW.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.size[0]}×{self.size[1]}, {self.fit}"
