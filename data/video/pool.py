"""Open video files of one process, the least recently used closed first."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from vlaforge.data.video.backends import Decoder, open_file
from vlaforge.data.video.index import Expected, FrameIndex, build_index

_INDEXES_KEPT = 4096
_ABANDONED: list[object] = []


class VideoPool:
    """Frames by file and row, with decoders kept open.

    A decoder holds file offsets and codec state that a forked child would share with its parent, so each
    process opens
    its own: after a fork the inherited ones are left untouched (not even closed), and pickling carries none.

    Args:
        backend: one of `vlaforge.data.video.backends.BACKENDS`.
        fps: rows a second of the dataset.
        capacity: files kept open.
    """

    def __init__(self, backend: str, fps: float, capacity: int = 64):
        self.backend, self.fps, self.capacity = backend, fps, capacity
        self._indexes: OrderedDict[str, FrameIndex] = OrderedDict()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._open: OrderedDict[str, Decoder] = OrderedDict()

    def __getstate__(self) -> dict:
        return {"backend": self.backend, "fps": self.fps, "capacity": self.capacity}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def index(self, path: str) -> FrameIndex:
        """The frame index of `path`, built once a process."""
        found = self._indexes.get(path)
        if found is None:
            found = self._indexes[path] = build_index(path)
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        else:
            self._indexes.move_to_end(path)
        return found

    def frames(self, path: str, rows: Sequence[int], expected: Expected) -> np.ndarray:
        """The frames of dataset rows `rows` (counted from the file's start): uint8 [n, H, W, 3], in the order
        asked.

        Rows may repeat and come in any order; each frame is decoded once. Raises DecodeError, never returns another
        frame. `expected` is what the dataset says the file holds.
        """
        if self._pid != os.getpid():
            _ABANDONED.append(self._open)  # keeps the parent's decoders from being destroyed here
            self._reset()
        positions = self.index(path).positions(rows, self.fps, expected)
        distinct = sorted(set(positions))
        frames = self._decoder(path).frames(distinct)
        if distinct == positions:
            return frames
        slot = {position: number for number, position in enumerate(distinct)}
        return frames[[slot[position] for position in positions]]

    def _decoder(self, path: str) -> Decoder:
        decoder = self._open.get(path)
        if decoder is None:
            while len(self._open) >= self.capacity:
                self._open.popitem(last=False)[1].close()
            decoder = self._open[path] = open_file(self.backend, path, self.index(path))
        else:
            self._open.move_to_end(path)
        return decoder

    def close(self) -> None:
        """Closes every file of this process."""
        if self._pid == os.getpid():
            for decoder in self._open.values():
                decoder.close()
        self._reset()
