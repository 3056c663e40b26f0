"""torchvision's VideoReader on PyAV, frame by frame after a seek. torchvision removed it in 0.26."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from vlaforge.data.video.backends.pyav import rotation, turned
from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import FrameIndex

_GONE = "torchvision {version} has no VideoReader (removed in 0.26; it needs torchvision < 0.26, that is torch < 2.11)"


class TorchvisionDecoder:
    """Continues from the last frame when the next one wanted follows in the same group, else seeks to its key frame."""

    def __init__(self, path: str, index: FrameIndex):
        import torchvision

        if not hasattr(torchvision.io, "VideoReader"):
            raise ImportError(_GONE.format(version=torchvision.__version__))
        self.path, self.index = path, index
        self._next, self._rotation = -1, rotation(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its deprecation notice
            torchvision.set_video_backend("pyav")
            self._reader = torchvision.io.VideoReader(path, "video")

    def frames(self, positions: Sequence[int]) -> np.ndarray:
        return np.stack([self._frame(position) for position in positions])

    def _frame(self, position: int) -> np.ndarray:
        key, key_dts = self.index.key_before(position)
        base = self.index.time_base
        if not key <= self._next <= position:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # "accurate seek is not implemented": the frame's time is compared below
                self._reader.seek(float(key_dts * base))
        wanted = float(self.index.pts_at(position) * base)
        try:
            for frame in self._reader:
                if frame["pts"] >= wanted - 0.5 * float(base):
                    if frame["pts"] > wanted + 0.5 * float(base):
                        raise ValueError("the frame is not in the stream")
                    self._next = position + 1
                    return turned(frame["data"].permute(1, 2, 0).numpy(), self._rotation)
            raise ValueError("the stream ends before it")
        except Exception as error:  # PyAV's errors, and torchvision's own
            self._next = -1
            seconds = self.index.seconds(position)
            raise DecodeError.of(self.path, position, seconds, "torchvision_av", error) from error

    def close(self) -> None:
        self._reader.container.close()


def open_file(path: str, index: FrameIndex) -> TorchvisionDecoder:
    return TorchvisionDecoder(path, index)
