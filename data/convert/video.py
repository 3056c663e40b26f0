"""Videos of a conversion: episodes joined into one file without encoding again, and pictures encoded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.video import FrameIndex, build_index
from vlaforge.data.video.backends.pyav import rotation

_TICKS = 128  # of the container's clock a frame: room for decode times between presentation times


class JoinedVideo:
    """An mp4 to which episodes are appended by copying their packets, so no picture changes.

    Every packet is put on the grid of the dataset's rate: frame n of the file is shown at exactly n / fps.
    """

    def __init__(self, path: Path, fps: float):
        self.path, self.frames, self.bytes = path, 0, 0
        self.tick = Fraction(1, 1) / (Fraction(fps).limit_denominator(1001) * _TICKS)
        self._output = self._stream = self._like = None

    def takes(self, source: Path) -> bool:
        """Whether `source` has the codec settings of what is in the file already."""
        return self._like in (None, _settings(source))

    def append(self, source: Path, rows: int) -> int:
        """Adds the video of one episode; returns the frame it starts at.

        UserError unless it has `rows` frames, all of them shown as they are stored: what an edit list hides or a
        display matrix turns is of the file, and would be lost in a joined one.
        """
        index = build_index(str(source))
        if index.count != rows:
            raise UserError(
                f"{source} has {index.count} frames for an episode of {rows} rows; a copy would carry that on."
            )
        if index.hidden or rotation(str(source)):
            what = f"hides {index.hidden} frames (it was cut without encoding)" if index.hidden else "is shown turned"
            raise UserError(f"{source} {what}, which packets cannot carry into a joined file: encode it again first.")
        with av.open(str(source)) as container:
            stream = container.streams.video[0]
            if self._output is None:
                self._open(source, stream)
            start = self.frames
            for packet, shown, decoded in _on_grid(container, stream, index):
                packet.stream = self._stream
                packet.time_base = self.tick
                packet.pts, packet.dts = (start + shown) * _TICKS, (start + decoded) * _TICKS
                packet.duration = _TICKS
                self.bytes += packet.size
                self._output.mux(packet)
        self.frames += rows
        return start

    def _open(self, source: Path, stream: av.VideoStream) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._like = _settings(source)
        self._output = av.open(str(self.path), "w", format="mp4", options={"movflags": "+faststart"})
        self._stream = self._output.add_stream_from_template(stream, opaque=True)
        self._stream.time_base = self.tick

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None


def _settings(path: Path) -> tuple:
    with av.open(str(path)) as container:
        codec = container.streams.video[0].codec_context
        return codec.name, codec.width, codec.height, codec.pix_fmt, bytes(codec.extradata or b"")


def _on_grid(container, stream, index: FrameIndex) -> Iterable[tuple[av.Packet, int, int]]:
    """(packet, frame at which it is shown, frame at which it is decoded) in decode order.

    Decoding runs ahead of showing by as many frames as the stream reorders.
    """
    packets = [packet for packet in container.demux(stream) if packet.size and packet.pts is not None]
    shown = np.argsort(np.argsort([packet.pts for packet in packets], kind="stable"), kind="stable")
    ahead = int(np.max(np.arange(len(packets)) - shown, initial=0))
    for number, packet in enumerate(packets):
        yield packet, int(shown[number]), number - ahead


def encode(path: Path, frames: Iterable[np.ndarray], fps: float, codec: str, crf: int) -> None:
    """Writes uint8 [H, W, 3] frames as an mp4 with a key frame every second frame, so that any one is quick to reach.

    Raises UserError where this PyAV has no such encoder or it refuses the size.
    """
    options = {"crf": str(crf), "g": "2"}
    options |= {"preset": "10"} if codec == "libsvtav1" else {"preset": "medium"}
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder prints its settings otherwise
    try:
        with av.open(str(path), "w", format="mp4") as output:
            stream = None
            for frame in frames:
                if stream is None:
                    stream = output.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
                    stream.height, stream.width, stream.pix_fmt = *frame.shape[:2], "yuv420p"
                output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            output.mux(stream.encode(None))
    except (av.FFmpegError, ValueError) as error:
        raise UserError(
            f"Cannot encode {path.name} with {codec}: {error}; try --video-codec or --cameras image."
        ) from error


def facts(path: Path, fps: float) -> dict[str, object]:
    """The ``info`` of a video feature in info.json."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context
        return {
            "video.height": codec.height,
            "video.width": codec.width,
            "video.codec": codec.codec.canonical_name,
            "video.pix_fmt": codec.pix_fmt,
            "video.is_depth_map": False,
            "video.fps": int(fps) if float(fps).is_integer() else fps,
            "video.channels": 3,
            "has_audio": False,
        }
