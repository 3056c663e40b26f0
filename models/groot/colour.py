"""Changes of colour in training: brightness, contrast, saturation and hue, in random order, alike for all views.

    brightness  f·x          contrast  f·x + (1 - f)·mean(grey)          saturation  f·x + (1 - f)·grey
    hue         the angle of HSV turned by f of a full turn

Facts: ColorJitter of Albumentations and torchvision, which Isaac-GR00T trains with. Computed in fp32 and rounded once,
where those round after each of the four.

Axes: V views, H W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GREY = np.array([0.299, 0.587, 0.114], np.float32)


def jitter(views_VHW3: np.ndarray, widths: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """uint8 in and out. `widths`: of brightness, contrast, saturation (factors in 1 ± width, at least 0) and hue (turns
    in ± width)."""
    order = rng.permutation(len(CHANGES))
    draws = [rng.uniform(max(0.0, 1 - width), 1 + width) for width in widths[:3]] + [rng.uniform(-widths[3], widths[3])]
    x = views_VHW3.astype(np.float32) / 255
    for which in order:
        if widths[which]:
            x = np.clip(CHANGES[which](x, np.float32(draws[which])), 0, 1)
    return np.rint(x * 255).astype(np.uint8)


def brightness(x: np.ndarray, factor: np.float32) -> np.ndarray:
    return x * factor


def contrast(x: np.ndarray, factor: np.float32) -> np.ndarray:
    mean_V111 = (x @ GREY).mean((1, 2), dtype=np.float64).astype(np.float32)[:, None, None, None]
    return x * factor + mean_V111 * (1 - factor)


def saturation(x: np.ndarray, factor: np.float32) -> np.ndarray:
    return x * factor + (x @ GREY)[..., None] * (1 - factor)


def hue(x: np.ndarray, turns: np.float32) -> np.ndarray:
    """Turns the colour circle; lightest and darkest channel, so value and saturation, stay."""
    value, spread = x.max(-1), np.ptp(x, -1)
    r, g, b = np.moveaxis(x, -1, 0)
    safe = np.where(spread == 0, np.float32(1), spread)
    sixth = np.where(value == r, (g - b) / safe, np.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe))
    turned = sixth + np.float32(6) * turns
    place = (np.array([5, 3, 1], np.float32) + turned[..., None]) % 6
    return value[..., None] - spread[..., None] * np.clip(np.minimum(place, 4 - place), 0, 1)


CHANGES = (brightness, contrast, saturation, hue)
