"""TorchCodec, by frame number. Every frame's time is compared with the index before it is handed on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlaforge.data.video.errors import DecodeError
from vlaforge.data.video.index import FrameIndex


class TorchCodecDecoder:
    """Approximate seeking (no scan of the file when it is opened) where frames are evenly spaced and groups closed,
    else exact."""

    def __init__(self, path: str, index: FrameIndex):
        from torchcodec.decoders import VideoDecoder

        self.path, self.index = path, index
        mode = "approximate" if index.step and index.closed and not index.first else "exact"
        self._decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode=mode)
        self._first_s = float(index.first * index.time_base)

    def frames(self, positions: Sequence[int]) -> np.ndarray:
        try:
            batch = self._decoder.get_frames_at(list(positions))
        except Exception as error:  # torchcodec raises RuntimeError, IndexError or ValueError by version
            raise self._error(positions[0], str(error).splitlines()[0]) from error
        tick = float(self.index.time_base)
        for position, shown in zip(positions, batch.pts_seconds.tolist()):
            expected = self._first_s + self.index.seconds(position)
            if abs(shown - expected) > 0.6 * tick + 1e-6:
                raise self._error(position, f"it returned the frame shown at {shown:.4f} s")
        return batch.data.numpy()

    def _error(self, position: int, cause: str) -> DecodeError:
        return DecodeError.of(self.path, position, self.index.seconds(position), "torchcodec", cause)

    def close(self) -> None:
        del self._decoder


def open_file(path: str, index: FrameIndex) -> TorchCodecDecoder:
    return TorchCodecDecoder(path, index)
