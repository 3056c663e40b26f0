"""PyAV: seeks to the key frame by its decode time and decodes up to the last frame that is wanted, in one
pass."""

from __future__ import annotations

from collections.abc import Sequence

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import FrameIndex


class PyAVDecoder:
    """Continues from where the last call stopped when no key frame lies between, so reading in order never
    seeks."""

    def __init__(self, path: str, index: FrameIndex):
        self.path, self.index = path, index
        self._container = av.open(path)
        self._stream = self._container.streams.video[0]
        # Loader workers are the parallelism. Frame threads would also delay output by their number.
        self._stream.codec_context.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        self._convert = VideoReformatter()
        self._decoded = None
        self._next = 0  # the position that `_decoded` yields next

    def frames(self, positions: Sequence[int]) -> np.ndarray:
        pictures = []
        for position in positions:
            try:
                frame = self._frame(position)
                if frame.is_corrupt:
                    raise ValueError("the decoder marks the frame as damaged")
                picture = self._convert.reformat(frame, format="rgb24").to_ndarray()
                pictures.append(turned(picture, frame.rotation))
            except (av.FFmpegError, ValueError) as error:
                self._decoded = None
                seconds = self.index.seconds(position)
                raise DecodeError.of(self.path, position, seconds, "pyav", error) from error
        return pictures[0][None] if len(pictures) == 1 else np.stack(pictures)

    def _frame(self, position: int) -> av.VideoFrame:
        key, key_dts = self.index.key_before(position)
        if self._decoded is None or not key <= self._next <= position:
            self._container.seek(key_dts, stream=self._stream, backward=True)
            self._decoded = self._container.decode(self._stream)
        wanted = self.index.pts_at(position)
        for frame in self._decoded:
            if frame.pts is not None and frame.pts >= wanted:
                if frame.pts != wanted:
                    raise ValueError("the frame is not in the stream")
                self._next = position + 1
                return frame
        raise ValueError("the stream ends before it")

    def close(self) -> None:
        self._decoded = None
        self._container.close()


def turned(picture: np.ndarray, degrees: int) -> np.ndarray:
    """[H, W, 3] turned as the file asks for it (counter-clockwise): the other decoders do that by themselves."""
    return np.ascontiguousarray(np.rot90(picture, round(degrees / 90))) if degrees else picture


def rotation(path: str) -> int:
    """Degrees that the pictures of `path` are to be turned by, from its first frame."""
    with av.open(path) as container:
        return next((frame.rotation for frame in container.decode(video=0)), 0)


def open_file(path: str, index: FrameIndex) -> PyAVDecoder:
    return PyAVDecoder(path, index)
