"""Decord, by frame number. It tells the time of a number, not of the picture that it returns, so it is used only where
its way of counting (frames since the key frame that it entered at) is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import FrameIndex

_EXACT = ("mp4", "matroska", "avi")


class DecordDecoder:
    def __init__(self, path: str, index: FrameIndex):
        import decord

        self.path, self.index = path, index
        if not (index.closed and any(name in index.container for name in _EXACT)):
            what = "videos with open groups of frames" if not index.closed else f"the format {index.container}"
            raise DecodeError.of(path, 0, 0.0, "decord", f"it returns other frames in {what}: use torchcodec or pyav")
        try:
            self._reader = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
        except Exception as error:  # decord raises its own error classes, by version
            cause = f"{str(error).splitlines()[0]} (its FFmpeg may lack {index.codec})"
            raise DecodeError.of(path, 0, 0.0, "decord", cause) from error
        if len(self._reader) != index.count:
            cause = f"it finds {len(self._reader)} frames where the file shows {index.count}: use torchcodec or pyav"
            raise DecodeError.of(path, 0, 0.0, "decord", cause)

    def frames(self, positions: Sequence[int]) -> np.ndarray:
        period = self.index.seconds(1) if self.index.count > 1 else 1.0
        try:
            spans = np.asarray(self._reader.get_frame_timestamp(list(positions)))
            frames = self._reader.get_batch(list(positions)).asnumpy()
        except Exception as error:
            raise self._error(positions[0], str(error).splitlines()[0]) from error
        first = float(self.index.first * self.index.time_base)
        for position, (shown, _) in zip(positions, spans):
            expected = self.index.seconds(position)
            if min(abs(shown - expected), abs(shown - first - expected)) > 0.5 * period:
                raise self._error(position, f"it returned the frame shown at {shown:.4f} s")
        return frames

    def _error(self, position: int, cause: str) -> DecodeError:
        return DecodeError.of(self.path, position, self.index.seconds(position), "decord", cause)

    def close(self) -> None:
        del self._reader


def open_file(path: str, index: FrameIndex) -> DecordDecoder:
    return DecordDecoder(path, index)
