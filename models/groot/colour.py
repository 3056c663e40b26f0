"""Changes of colour in training: brightness, contrast, saturation and hue, in random order, alike for all views.

    brightness  f·x          contrast  f·x + (1 - f)·mean(grey)          saturation  f·x + (1 - f)·grey
    hue         the angle of HSV turned by f of a full turn

Facts: ColorJitter of Albumentations and torchvision, which Isaac-GR00T trains with. Computed in fp32 and rounded once,
where those round after each of the four.

Axes: V views, C = 3 channels, H W pixels; values in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GREY = (0.299, 0.587, 0.114)


def jitter(views_VHWC: np.ndarray, widths: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """uint8 in and out. `widths`: of brightness, contrast, saturation (factors in 1 ± width, at least 0) and hue (turns
    in ± width)."""
    order = rng.permutation(len(CHANGES))
    draws = [rng.uniform(max(0.0, 1 - width), 1 + width) for width in widths[:3]] + [rng.uniform(-widths[3], widths[3])]
    # One plane a channel: each step then runs over contiguous memory.
    x_VCHW = torch.from_numpy(views_VHWC).permute(0, 3, 1, 2).contiguous().float().div_(255)
    for which in order:
        if widths[which]:
            x_VCHW = CHANGES[which](x_VCHW, float(draws[which])).clamp_(0, 1)
    return x_VCHW.mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


def grey(x_VCHW: Tensor) -> Tensor:
    """[V, H, W]"""
    r, g, b = x_VCHW.unbind(1)
    return (r * GREY[0]).add_(g, alpha=GREY[1]).add_(b, alpha=GREY[2])


def brightness(x_VCHW: Tensor, factor: float) -> Tensor:
    return x_VCHW * factor


def contrast(x_VCHW: Tensor, factor: float) -> Tensor:
    mean_V = x_VCHW.mean((2, 3)) @ torch.tensor(GREY)
    return x_VCHW * factor + mean_V[:, None, None, None] * (1 - factor)


def saturation(x_VCHW: Tensor, factor: float) -> Tensor:
    return torch.lerp(grey(x_VCHW)[:, None], x_VCHW, factor)


def hue(x_VCHW: Tensor, turns: float) -> Tensor:
    """Turns the colour circle; the largest and the smallest channel of a pixel keep their values."""
    r, g, b = x_VCHW.unbind(1)
    value = x_VCHW.amax(1)
    spread = value - x_VCHW.amin(1)
    safe = spread.clamp_min(1e-12)  # where nothing is spread, whatever comes out is multiplied by 0
    sixth = torch.where(value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    out_VCHW = torch.empty_like(x_VCHW)
    for channel, first in enumerate((5, 3, 1)):
        place = (sixth + (first + 6 * turns)).remainder_(6)
        share = torch.minimum(place, 4 - place).clamp_(0, 1)
        torch.addcmul(value, spread, share, value=-1, out=out_VCHW[:, channel])
    return out_VCHW


CHANGES = (brightness, contrast, saturation, hue)
