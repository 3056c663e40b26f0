"""Camera frames → model input, on the device: placement (resize, padding, augmentation) and the range [-1, 1].

Axes: B samples, V views, H W pixels of the camera, S side of the model's input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlaforge.data.images import resize_with_pad, sample_views


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
