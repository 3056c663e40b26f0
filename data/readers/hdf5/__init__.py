"""HDF5 datasets: one reader, and an adapter for each convention that says where things are.

aloha.py robomimic.py agilex.py   a convention each      recordings.py  what an adapter describes
reader.py  the Dataset                                   files.py       open files, pictures, texts
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.readers.hdf5 import agilex, aloha, robomimic
from vlaforge.data.readers.hdf5.files import hdf5_files, open_hdf5
from vlaforge.data.readers.hdf5.reader import Hdf5Reader
from vlaforge.data.readers.hdf5.recordings import Options

LAYOUTS = {module.NAME: module for module in (agilex, aloha, robomimic)}  # the first that fits is taken


def detect(path: Path) -> str | None:
    """The convention of the HDF5 file, or of the first one in the folder; None when it is none of `LAYOUTS`."""
    for name in hdf5_files(path)[:1]:
        with open_hdf5(name) as file:
            return next((layout for layout, module in LAYOUTS.items() if module.matches(file)), None)
    return None


def resolve_layout(path: Path, layout: str | None) -> str:
    """`layout`, or the one found at `path`. UserError when it is unknown, or there are no files of a known one."""
    if layout is not None and layout not in LAYOUTS:
        raise unknown("HDF5 layout", layout, LAYOUTS)
    if not hdf5_files(path):
        raise UserError(f"{path} holds no HDF5 file (*.hdf5, *.h5).")
    layout = layout or detect(path)
    if layout is None:
        known = "; ".join(f"{name}: {module.HOLDS}" for name, module in LAYOUTS.items())
        raise UserError(f"{hdf5_files(path)[0]} is of no known HDF5 layout ({known}).")
    return layout


def open_recordings(
    path: Path, layout: str | None, options: Options, episodes: Sequence[int] | str | None, split: str
) -> Hdf5Reader:
    """Opens the HDF5 dataset at `path`. UserError when it holds no HDF5 files, or none of the convention."""
    layout = resolve_layout(path, layout)
    reader = agilex.AgilexReader if layout == agilex.NAME else Hdf5Reader
    return reader(path, LAYOUTS[layout].collect(path, options), episodes, split)
