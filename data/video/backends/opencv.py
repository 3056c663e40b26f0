"""OpenCV. Its seek may land elsewhere, so the time it reports is compared with the index and, if needed, it
reads on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import FrameIndex

_LOST = "OpenCV's FFmpeg cannot decode it (its wheels often lack {codec}); use the backend pyav or torchcodec"


class OpenCVDecoder:
    """Reads forward where it can; a position behind it is reached by a seek, checked by the frame's time."""

    def __init__(self, path: str, index: FrameIndex):
        import cv2

        self._cv2 = cv2
        self.path, self.index = path, index
        self._capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        self._next = 0
        if not self._capture.isOpened():
            raise DecodeError.of(path, 0, 0.0, "opencv", "the file cannot be opened")
        self._frame_before = self._read(0)
        # Some formats' times count from the file's first frame, others' from the container's zero. A file whose first
        # frame OpenCV does not show first is of neither kind, and none of its frames will pass for another.
        shown, self._first_s = self._shown(), float(index.first * index.time_base)
        self._first_s = 0.0 if abs(shown) < 2e-3 else self._first_s
        self._next = 1

    def frames(self, positions: Sequence[int]) -> np.ndarray:
        pictures = [self._cv2.cvtColor(self._frame(position), self._cv2.COLOR_BGR2RGB) for position in positions]
        return pictures[0][None] if len(pictures) == 1 else np.stack(pictures)

    def _frame(self, position: int) -> np.ndarray:
        key, _ = self.index.key_before(position)
        if position == self._next - 1:  # the one read last; a file of one frame cannot be rewound
            return self._frame_before
        if not key <= self._next <= position:
            self._capture.set(self._cv2.CAP_PROP_POS_FRAMES, position)
            self._next = position
        for _ in range(position - self._next):
            self._capture.grab()
        frame = self._read(position)
        if not self._shows(position):
            # The seek was not exact: start over from the first frame and count.
            self._capture.set(self._cv2.CAP_PROP_POS_FRAMES, 0)
            for _ in range(position):
                self._capture.grab()
            frame = self._read(position)
            if not self._shows(position):
                raise self._error(position, "OpenCV's seek does not reach it")
        self._frame_before, self._next = frame, position + 1
        return frame

    def _read(self, position: int) -> np.ndarray:
        read, frame = self._capture.read()
        if not read:
            raise self._error(position, _LOST.format(codec=self.index.codec))
        return frame

    def _shows(self, position: int) -> bool:
        """Whether the frame just read is the one at `position`, by the time OpenCV gives for it."""
        return abs(self._shown() - self._first_s - self.index.seconds(position)) < 2e-3

    def _shown(self) -> float:
        return self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1000

    def _error(self, position: int, cause: str) -> DecodeError:
        self._next = -1
        return DecodeError.of(self.path, position, self.index.seconds(position), "opencv", cause)

    def close(self) -> None:
        self._capture.release()


def open_file(path: str, index: FrameIndex) -> OpenCVDecoder:
    return OpenCVDecoder(path, index)
