"""Open HDF5 files of one process, and what is read from them besides rows: texts, pictures, names."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.readers.pictures import as_rgb, decode_picture
from vlaforge.data.video.errors import DecodeError

SUFFIXES = (".hdf5", ".h5")
_ABANDONED: list[object] = []


def hdf5_files(path: Path) -> list[Path]:
    """The HDF5 files at `path` (itself, or those of the folder), by the numbers in their names, then by name."""
    if path.is_file():
        return [path]
    return sorted((file for file in path.rglob("*") if file.suffix in SUFFIXES), key=natural)


def natural(name: Path | str) -> list[Any]:
    """A sort key that puts demo_2 before demo_10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", str(name)) if part]


def open_hdf5(path: Path) -> h5py.File:
    """Opens a file for reading only. UserError when it is missing or damaged."""
    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read as HDF5: {str(error).splitlines()[0]}.") from None


def text_of(value: Any) -> str | None:
    """The text in a scalar dataset, an attribute, or the first element of one; None when there is none."""
    if isinstance(value, h5py.Dataset):
        value = value[()]
    if isinstance(value, np.ndarray):
        value = value.reshape(-1)[0] if value.size else None
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return str(value) if value is not None and str(value).strip() else None


def rate_of(value: Any) -> float:
    """Rows a second that an attribute gives; 0 where it gives none that makes sense."""
    try:
        rate = float(value)
    except (TypeError, ValueError):
        return 0.0
    return rate if 0 < rate < float("inf") else 0.0


def frame_counts(group: h5py.Group, cameras: Mapping[str, str]) -> dict[str, int]:
    """Frames that each camera has; 0 where its path is no dataset."""
    found = {camera: group.get(path) for camera, path in cameras.items()}
    return {camera: len(item) if isinstance(item, h5py.Dataset) and item.shape else 0 for camera, item in found.items()}


def picture(frames: h5py.Dataset, row: int, where: str) -> np.ndarray:
    """uint8 [H, W, 3] of row `row`: raw pixels, or an encoded picture, padded with zeros or of its own length.

    ALOHA's ``compress_len`` is not needed: a JPEG says itself where it ends.
    """
    try:
        cell = frames[row]
    except (OSError, ValueError, IndexError) as error:
        raise DecodeError(f"Cannot read the picture of {where}: {error}") from error
    if frames.ndim >= 3:
        return as_rgb(cell, "hwc" if cell.shape[-1] in (1, 3, 4) else "chw", where)
    return decode_picture(cell, where)


class Hdf5Pool:
    """Files kept open, the least recently used closed first; each process opens its own (see `VideoPool`)."""

    def __init__(self, capacity: int = 64):
        self.capacity = capacity
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._open: OrderedDict[Path, h5py.File] = OrderedDict()

    def __getstate__(self) -> dict:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def file(self, path: Path) -> h5py.File:
        if self._pid != os.getpid():
            _ABANDONED.append(self._open)
            self._reset()
        found = self._open.get(path)
        if found is None:
            while len(self._open) >= self.capacity:
                self._open.popitem(last=False)[1].close()
            found = self._open[path] = open_hdf5(path)
        else:
            self._open.move_to_end(path)
        return found
