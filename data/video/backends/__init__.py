"""One file a decoder: `open_file(path, index) -> Decoder`. Imported by name, so none is needed but the one in
use."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import numpy as np

from vlaforge.data.errors import unknown
from vlaforge.data.video.index import FrameIndex

BACKENDS = ("torchcodec", "pyav", "decord", "opencv", "torchvision_av")


class Decoder(Protocol):
    """One open video file."""

    def frames(self, positions: Sequence[int]) -> np.ndarray:
        """The frames at ascending, distinct `positions`: uint8 [n, H, W, 3], RGB.

        Raises DecodeError when one of them cannot be decoded or is not the frame that the index says.
        """

    def close(self) -> None:
        """Frees the file."""


def open_file(backend: str, path: str, index: FrameIndex) -> Decoder:
    """Opens `path` with `backend` (one of `BACKENDS`). ImportError when its package is missing."""
    if backend not in BACKENDS:
        raise unknown("video backend", backend, BACKENDS)
    return import_module(f"vlaforge.data.video.backends.{backend}").open_file(path, index)
