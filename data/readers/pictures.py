"""Encoded pictures (PNG, JPEG) to RGB arrays."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from vlaforge.data.video.errors import DecodeError

_EIGHT_BIT = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")


def decode_picture(data: bytes | memoryview | np.ndarray, where: str) -> np.ndarray:
    """uint8 [H, W, 3], RGB; grey is repeated over the channels, transparency dropped. DecodeError names
    `where`."""
    try:
        with Image.open(BytesIO(bytes(data))) as picture:
            if picture.mode not in _EIGHT_BIT:
                raise DecodeError(f"The picture of {where} has mode {picture.mode}; expected 8 bits a channel.")
            return np.asarray(picture.convert("RGB"))
    except UnidentifiedImageError:
        raise DecodeError(f"Cannot decode the picture of {where}: its {len(data)} bytes are no known picture") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise DecodeError(f"Cannot decode the picture of {where}: {error}") from error


def as_rgb(pixels: np.ndarray, layout: str, where: str) -> np.ndarray:
    """uint8 [H, W, 3] of raw pixels whose channels come last (``hwc``) or first (``chw``)."""
    pixels = np.ascontiguousarray(pixels if layout == "hwc" else np.moveaxis(pixels, 0, -1))
    if pixels.dtype != np.uint8:
        raise DecodeError(f"The picture of {where} has dtype {pixels.dtype}; expected uint8.")
    channels = pixels.shape[-1]
    if channels == 1:
        return np.repeat(pixels, 3, axis=-1)
    if channels not in (3, 4):
        raise DecodeError(f"The picture of {where} has shape {pixels.shape}; expected 1, 3 or 4 channels last.")
    return pixels if channels == 3 else np.ascontiguousarray(pixels[..., :3])
