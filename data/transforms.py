"""Composable image steps. Each is a small frozen object; a `Compose` turns them into one `Placement` per
image.

    steps = Compose((RandomCrop(0.95), ResizeWithPad(224, 224), Rotate(5.0), ColorJitter(0.3, 0.4, 0.5)))
    placement = steps.place(frame.shape[:2], rng=sample_rng(seed, epoch, row, "augment"))   # training
    placement = steps.place(frame.shape[:2])                                                # evaluation: no
    rng

The random numbers are drawn on the CPU from the sample's own generator. The 16 numbers of each placement go
with the uint8 frame to the device, where `images.sample_views` does everything in one pass; `Compose.apply`
is the same pass in the worker. Without a generator a random crop is the centre crop of its size and the
other random steps do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.data.images import Anchor, Placement, fit, margins, sample_views

Rng = np.random.Generator | None


class Step:
    """One change of a placement. `mean` is the frame's mean value in [0, 1] (contrast turns about it)."""

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        raise NotImplementedError


@dataclass(frozen=True)
class Resize(Step):
    """To (height, width), without keeping the aspect."""

    height: int
    width: int

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        return now.resize(self.height, self.width)


@dataclass(frozen=True)
class ResizeWithPad(Step):
    """To (height, width), keeping the aspect; padding around (``centre``) or left and above (``end``)."""

    height: int
    width: int
    anchor: Anchor = "centre"

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        inner_h, inner_w = fit(*now.size, self.height, self.width)
        left = margins(inner_w, self.width, self.anchor)[0]
        top = margins(inner_h, self.height, self.anchor)[0]
        return now.resize(inner_h, inner_w).pad(left, top, self.height, self.width)


@dataclass(frozen=True)
class CentreCrop(Step):
    """The middle window with `fraction` of each side (rounded down, at least one pixel)."""

    fraction: float

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        height, width = _window(now.size, self.fraction)
        return now.crop((now.size[1] - width) // 2, (now.size[0] - height) // 2, height, width)


@dataclass(frozen=True)
class RandomCrop(Step):
    """A window with `fraction` of each side anywhere in the image; the centre one without a generator."""

    fraction: float

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        if rng is None:
            return CentreCrop(self.fraction).place(now, rng, mean)
        height, width = _window(now.size, self.fraction)
        top = int(rng.integers(0, now.size[0] - height + 1))
        left = int(rng.integers(0, now.size[1] - width + 1))
        return now.crop(left, top, height, width)


@dataclass(frozen=True)
class Rotate(Step):
    """By an angle uniform in ±`degrees`; corners become padding."""

    degrees: float

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        return now if rng is None else now.rotate(float(rng.uniform(-self.degrees, self.degrees)))


@dataclass(frozen=True)
class ColorJitter(Step):
    """Factors uniform in 1 ± the given width for brightness, contrast (about the frame's mean) and
    saturation.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def place(self, now: Placement, rng: Rng, mean: float) -> Placement:
        if rng is None:
            return now
        b, c, s = (1 + w * rng.uniform(-1, 1) for w in (self.brightness, self.contrast, self.saturation))
        return replace(now, colour=(float(b), float(c), float(mean * b), float(s)))


def _window(size: tuple[int, int], fraction: float) -> tuple[int, int]:
    return max(1, int(size[0] * fraction)), max(1, int(size[1] * fraction))


STEPS: dict[str, type[Step]] = {
    "resize": Resize,
    "resize_with_pad": ResizeWithPad,
    "centre_crop": CentreCrop,
    "random_crop": RandomCrop,
    "rotate": Rotate,
    "color_jitter": ColorJitter,
}


@dataclass(frozen=True)
class Compose:
    """Steps in order. Values outside come as uint8 frames and leave as floats in [low, 1]."""

    steps: tuple[Step, ...]
    low: float = -1.0

    def place(self, size: tuple[int, int], rng: Rng = None, mean: float = 0.5) -> Placement:
        """The placement of a frame of `size` (height, width). All random numbers come from `rng`, in step
        order.
        """
        now = Placement.whole(*size)
        for step in self.steps:
            now = step.place(now, rng, mean)
        return now

    def params(self, frames_VHWC: np.ndarray, rngs: Iterable[Rng]) -> np.ndarray:
        """float32 [V, 16]: what travels with uint8 frames [V, H, W, 3]; one generator (or None) a view."""
        size = frames_VHWC.shape[1:3]
        return np.stack(
            [self.place(size, rng, _mean(f)).vector() for f, rng in zip(frames_VHWC, rngs, strict=True)]
        )

    def apply(self, frames_VHWC: np.ndarray, rngs: Iterable[Rng] | None = None) -> Tensor:
        """The CPU path: uint8 [V, H, W, 3] → float32 [V, 3, height, width]; None for `rngs` is evaluation."""
        rngs = [None] * len(frames_VHWC) if rngs is None else list(rngs)
        params = torch.from_numpy(self.params(frames_VHWC, rngs))
        return sample_views(
            torch.from_numpy(frames_VHWC), params, self.place(frames_VHWC.shape[1:3]).size, low=self.low
        )

    def unapply(
        self, x_CHW: Tensor, source_size: tuple[int, int], placement: Placement | None = None
    ) -> np.ndarray:
        """float [3, h, w] in [low, 1] → uint8 [*source_size, 3]: geometry and range undone, colour as it is.

        What a crop removed comes back black. `placement` defaults to the one of evaluation. UserError when
        the image does not have the placement's size.
        """
        placement = placement or self.place(source_size)
        if tuple(x_CHW.shape[1:]) != placement.size:
            raise UserError(
                f"The image has size {list(x_CHW.shape[1:])}, but its transform gives {placement.size}."
            )
        back = placement.inverse(source_size)
        u8 = ((x_CHW.float() - self.low) / (1 - self.low) * 255).round().clamp(0, 255).to(torch.uint8)
        out = sample_views(
            u8.permute(1, 2, 0)[None], torch.from_numpy(back.vector())[None], source_size, low=0.0
        )
        return (out[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def _mean(frame: np.ndarray) -> float:
    """Mean of every fourth row and column: close to the frame's, at a sixteenth of the cost."""
    return float(frame[::4, ::4].mean()) / 255.0
