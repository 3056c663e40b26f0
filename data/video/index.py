"""The frame index of a video file: where its frames and key frames are, in presentation order.

Frames are addressed by integer position in presentation order. Time appears only here: `FrameIndex.positions`
turns dataset rows into positions, and the backends use `pts` to check that they got the frame that was asked
for.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np

from vlaforge.data.video.errors import DecodeError

_TOLERANCE_FRAMES = 0.5 + 1e-6  # a time exactly half a frame away still counts as near


class Expected(NamedTuple):
    """What a dataset says about one of its files: rows of all episodes in it, and where the last of them ends.

    The two differ where episodes were removed and their frames are still there.
    """

    rows: int
    end: int


@dataclass(frozen=True, eq=False)
class FrameIndex:
    """What a file really holds, by its packets (not by what its header promises).

    Args:
        count: frames present.
        step: ticks between frames when they are evenly spaced, else 0.
        pts: int64 [count], presentation ticks; empty when evenly spaced (then ``first + step * position``).
        keys: int64 [K], ascending positions of the key frames. One that an edit list hides counts as the position of
            the first frame shown after it, because decoding that still starts there.
        key_dts: int64 [K], decode ticks to seek to for them.
        hidden: frames that are stored but not shown, because an edit list leaves them out; `count` has them not.
        closed: no frame that is shown before a key frame is stored behind it. Decoders that count frames from where
            they entered are wrong in open groups.
        container: FFmpeg's name of the file's format.
        width, height: as stored; a file may ask to be shown turned by quarters.
    """

    path: str
    count: int
    time_base: Fraction
    first: int
    step: int
    pts: np.ndarray
    keys: np.ndarray
    key_dts: np.ndarray
    hidden: int
    closed: bool
    container: str
    codec: str
    width: int
    height: int

    def pts_at(self, position: int) -> int:
        """Presentation ticks of the frame at `position`."""
        return self.first + self.step * position if self.step else int(self.pts[position])

    def seconds(self, position: int) -> float:
        """Seconds from the file's first frame to the frame at `position`, which may lie past the end."""
        if self.step:
            return float(self.step * position * self.time_base)
        inside = min(position, self.count - 1)
        return float((int(self.pts[inside]) - self.first) * self.time_base)

    def key_before(self, position: int) -> tuple[int, int]:
        """(position, decode ticks) of the last key frame at or before `position`."""
        number = bisect_right(self.keys, position) - 1
        if number < 0:
            raise DecodeError(f"{self.path} has no key frame at or before frame {position}: the file is damaged.")
        return int(self.keys[number]), int(self.key_dts[number])

    def positions(self, rows: Sequence[int], fps: float, expected: Expected) -> list[int]:
        """Positions of the frames that belong to dataset rows `rows` (counted from the file's start).

        With as many frames as rows, or with frames evenly spaced at the dataset's `fps`, the row number is the
        position. Otherwise a row is looked up by its time, row / fps, and must be within half a frame of one.

        Raises DecodeError when the file has fewer frames than its episodes need, whichever of them are asked for:
        then it is not known which frames are missing.
        """
        if self.count == expected.rows == expected.end or self._spaced_at(fps):
            if self.count < max(expected.end, *(row + 1 for row in rows)):
                raise DecodeError(
                    f"{self.path} has {self.count} frames ({self.seconds(self.count):.4f} s), but the dataset's "
                    f"episodes need {expected.end} of it: the video and the rows do not belong together."
                )
            return list(rows)
        return [self._nearest(row / fps, fps) for row in rows]

    def _spaced_at(self, fps: float) -> bool:
        """Whether frame n is nearest to n / fps for all n of the file."""
        return self.step > 0 and abs(float(self.step * self.time_base) * fps - 1.0) * self.count < 0.25

    def _nearest(self, time_s: float, fps: float) -> int:
        ticks = float(self.first + Fraction(time_s) / self.time_base)
        if self.step:
            best = min(max(round((ticks - self.first) / self.step), 0), self.count - 1)
        else:
            right = min(int(np.searchsorted(self.pts, ticks)), self.count - 1)
            best = min((max(right - 1, 0), right), key=lambda position: abs(int(self.pts[position]) - ticks))
        if abs(self.pts_at(best) - ticks) * float(self.time_base) * fps > _TOLERANCE_FRAMES:
            raise DecodeError(
                f"{self.path} shows no frame at {time_s:.4f} s: the nearest is at "
                f"{self.seconds(best):.4f} s, more than half a frame ({0.5 / fps:.4f} s) away."
            )
        return best


def build_index(path: str) -> FrameIndex:
    """Indexes `path` (decodes nothing). DecodeError when it cannot be opened or holds no video."""
    if not os.path.isfile(path):
        raise DecodeError(f"Video file {path} is missing.")
    try:
        with av.open(path) as container:
            if not container.streams.video:
                raise DecodeError(f"{path} holds no video stream.")
            stream = container.streams.video[0]
            packets = _packets(container, stream, os.path.getsize(path))
            codec = stream.codec_context
            facts = (container.format.name, codec.codec.canonical_name, codec.width, codec.height)
            base = Fraction(stream.time_base)
    except av.FFmpegError as error:
        raise DecodeError(f"{path} cannot be opened as a video: {getattr(error, 'strerror', error)}.") from error
    if packets.hidden.all():
        raise DecodeError(f"{path} holds no video frames.")
    return _index(path, packets, base, *facts)


class _Packets(NamedTuple):
    """Arrays [n] in decode order; `hidden` are decoded but not shown (an edit list leaves them out)."""

    pts: np.ndarray
    dts: np.ndarray
    key: np.ndarray
    hidden: np.ndarray


def _table(stream) -> Sequence:
    try:
        return stream.index_entries
    except AttributeError:  # older PyAV
        return ()


def _packets(container, stream, size: int) -> _Packets:
    """The packets whose bytes are all there.

    The container's own table is enough when frames are shown in decode order; otherwise the packets are read.
    """
    reordered = stream.codec_context.has_b_frames or stream.codec_context.codec.name in ("h264", "hevc")
    table = () if reordered else _table(stream)
    if len(table) and "mp4" in container.format.name:
        kept = (entry for entry in table if entry.pos + entry.size <= size)
        rows = [(entry.timestamp, entry.timestamp, entry.is_keyframe, entry.is_discard) for entry in kept]
    else:
        rows = [
            (packet.pts, packet.pts if packet.dts is None else packet.dts, packet.is_keyframe, packet.is_discard)
            for packet in container.demux(stream)
            if packet.size and packet.pts is not None and not packet.is_corrupt
        ]
    ticks = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    flags = np.array([row[2:] for row in rows], bool).reshape(-1, 2)
    return _Packets(ticks[:, 0], ticks[:, 1], flags[:, 0], flags[:, 1])


def _index(
    path: str, packets: _Packets, base: Fraction, container: str, codec: str, width: int, height: int
) -> FrameIndex:
    shown = np.sort(packets.pts[~packets.hidden], kind="stable")
    key_pts, key_dts = packets.pts[packets.key], packets.dts[packets.key]
    order = np.argsort(key_pts, kind="stable")
    latest = np.maximum.accumulate(np.where(packets.key, packets.pts, packets.pts.min()))
    steps = np.diff(shown)
    step = int(steps[0]) if len(steps) else 1
    even = step > 0 and bool((steps == step).all())
    return FrameIndex(
        path=path,
        count=len(shown),
        time_base=base,
        first=int(shown[0]),
        step=step if even else 0,
        pts=np.zeros(0, np.int64) if even else shown,
        keys=np.searchsorted(shown, key_pts[order]),
        key_dts=key_dts[order],
        hidden=int(packets.hidden.sum()),
        closed=bool((packets.pts >= latest).all()),
        container=container,
        codec=codec,
        width=width,
        height=height,
    )
