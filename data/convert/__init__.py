"""A dataset in another format, written to a new folder: LeRobot v2.0 → v2.1 → v3.0, HDF5 → v3.0.

    output.py  the new folder, whole or absent     summary.py  statistics to store
    writer.py  the v3.0 layout                     video.py    videos joined or encoded
    lerobot.py hdf5.py  from each format

The source is checked first and the result afterwards, before it gets its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vlaforge.data.check import Report, check
from vlaforge.data.convert import hdf5, lerobot
from vlaforge.data.convert.output import check_output, leftovers, whole_folder
from vlaforge.data.convert.writer import Limits
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.readers import open_dataset
from vlaforge.data.readers.hdf5.recordings import Options

TARGETS = ("v2.1", "v3.0")
CAMERAS = ("video", "image")
# What a conversion would carry on unseen, or trip over. Constant dimensions and the like are the data's own affair.
_FATAL = ("files", "episodes", "rows", "types", "tasks", "video")


@dataclass(frozen=True)
class Conversion:
    """How to convert.

    Args:
        target: ``v3.0`` or (from v2.0) ``v2.1``.
        format, hdf5_layout, options, video_backend: of the source, as of `open_dataset`.
        limits: of the files written.
        cameras: HDF5 only, ``video`` or ``image``; `codec` and `crf` are the encoder's.
    """

    target: str = "v3.0"
    format: str = "lerobot_datasets"
    hdf5_layout: str | None = None
    options: Options = field(default_factory=Options)
    video_backend: str | None = None
    limits: Limits = field(default_factory=Limits)
    cameras: str = "video"
    codec: str = "libsvtav1"
    crf: int = 30


def convert(source: Path, goal: Path, how: Conversion, say: Callable[[str], None] = print) -> None:
    """Writes the dataset `source` to the new folder `goal`, and nothing anywhere else.

    Raises UserError when `goal` is not a new place, the source has defects that a copy would carry on, or there is no
    way from its format to the target. `goal` then does not exist.
    """
    if how.target not in TARGETS:
        raise unknown("target version", how.target, TARGETS)
    if how.cameras not in CAMERAS:
        raise unknown("way to store cameras", how.cameras, CAMERAS)
    check_output(source, goal)
    keywords = {"format": how.format, "hdf5_layout": how.hdf5_layout, "video_backend": how.video_backend}
    _refuse(check(source, options=how.options, **keywords), "The dataset has defects")
    reader = open_dataset(
        source,
        split="all",
        action_key=how.options.action_key or "action",
        state_key=how.options.state_key or "observation.state",
        language_key=how.options.language_key,
        fps=how.options.fps,
        **keywords,
    )
    for note in reader.notes:
        say(note)
    for folder in leftovers(goal):
        say(f"{folder} is unfinished: a conversion that was stopped left it, unless one is running; remove it")
    with whole_folder(source, goal) as work:
        if how.format == "hdf5_datasets":
            if how.target != "v3.0":
                raise UserError(f"HDF5 recordings are converted to v3.0, not {how.target}.")
            hdf5.to_v30(reader, work, how.limits, say, cameras=how.cameras, codec=how.codec, crf=how.crf)
        elif (reader.info.version, how.target) == ("v2.0", "v2.1"):
            lerobot.to_v21(reader, work, say)
        elif how.target == "v3.0" and reader.info.version != "v3.0":
            lerobot.to_v30(reader, work, how.limits, say)
        else:
            raise UserError(f"The dataset is {reader.info.version}; it cannot be converted to {how.target}.")
        _refuse(check(work, video_backend=how.video_backend), "The converted dataset has defects (a fault of ours)")


def _refuse(report: Report, what: str) -> None:
    fatal = [finding for finding in report.errors if finding.kind in _FATAL]
    if fatal:
        more = f" (and {len(fatal) - 1} more: run `forge-data check`)" if len(fatal) > 1 else ""
        where = f"episode {fatal[0].episode}, " if fatal[0].episode is not None else ""
        raise UserError(f"{what}: {where}{fatal[0].file}: {fatal[0].message}{more}.")
