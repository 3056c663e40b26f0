"""What is wrong with a dataset: `check(path)` → a `Report` with every defect, its file and its episode.

lerobot.py hdf5.py  the checks of a format     columns.py  checks on numbers, the same for all formats
video.py            checks on videos           findings.py  the report
"""

from __future__ import annotations

from pathlib import Path

from vlaforge.data.check.findings import KINDS, Finding, Report
from vlaforge.data.check.hdf5 import check_hdf5
from vlaforge.data.check.lerobot import check_lerobot
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.readers.hdf5.recordings import Options

__all__ = ["KINDS", "Finding", "Report", "check"]
FRAMES = ("ends", "all", "none")


def check(
    path: Path,
    *,
    format: str = "lerobot_datasets",
    version: str | None = None,
    hdf5_layout: str | None = None,
    options: Options | None = None,
    video_backend: str | None = None,
    frames: str = "ends",
) -> Report:
    """Reads the whole dataset at `path` and writes nothing.

    Args:
        format, version, hdf5_layout, video_backend: as of `open_dataset`.
        options: columns of an HDF5 dataset.
        frames: of each episode and camera, what is decoded: ``ends`` (first, middle, last), ``all``, ``none``.

    Raises UserError when there is no dataset of that format at `path` at all.
    """
    if frames not in FRAMES:
        raise unknown("choice of frames", frames, FRAMES)
    if not path.exists():
        raise UserError(f"Dataset path '{path}' does not exist.")
    report = Report(str(path))
    if format == "lerobot_datasets":
        check_lerobot(report, path, version, video_backend, frames)
    elif format == "hdf5_datasets":
        check_hdf5(report, path, hdf5_layout, options or Options(), frames)
    else:
        raise unknown("dataset format", format, ("lerobot_datasets", "hdf5_datasets"))
    return report
