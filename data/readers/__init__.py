"""Datasets of every format as one kind of object: `open_dataset(path)` → `vlaforge.data.dataset.Dataset`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.mixture import open_mixture
from vlaforge.data.readers.hdf5 import open_recordings
from vlaforge.data.readers.hdf5.files import SUFFIXES, hdf5_files
from vlaforge.data.readers.hdf5.recordings import Options
from vlaforge.data.readers.lerobot import LeRobotReader
from vlaforge.data.schema import ACTION, STATE

FORMATS = ("lerobot_datasets", "hdf5_datasets")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def open_dataset(
    path: str | Path,
    *,
    format: str = "lerobot_datasets",
    version: str | None = None,
    episodes: Sequence[int] | str | None = None,
    split: str = "train",
    video_backend: str | None = None,
    action_key: str = ACTION,
    state_key: str = STATE,
    language_key: str | None = None,
    image_layout: str | None = None,
    hdf5_layout: str | None = None,
    fps: float | None = None,
    open_videos: int = 64,
) -> Dataset:
    """Opens a dataset for reading. Nothing is ever written into its folder.

    Args:
        path: a folder (or HDF5 file), the id of a dataset on the Hugging Face hub, ``owner/name``, or a YAML
            file that describes a mixture of them (`vlaforge.data.mixture`).
        format: ``lerobot_datasets`` or ``hdf5_datasets``.
        version: LeRobot version that it must have; None takes the one in info.json.
        episodes: numbers, or text such as ``"0:10,15"``, in the order to visit; None takes those of `split`.
        split: a split of info.json, or ``all``.
        video_backend: one of `vlaforge.data.video.BACKENDS`; None tries torchcodec, then PyAV.
            `dataset.video` says which it became and why.
        action_key, state_key: the column that is the action, the state; several, separated by commas, are
            joined.
        language_key: a column with the task as text or as task number; None takes ``task_index``.
        image_layout: ``hwc`` or ``chw``, where info.json leaves open which axis holds the channels.
        hdf5_layout: ``aloha``, ``robomimic`` or ``agilex``; None finds out which it is.
        fps: rows a second of HDF5 recordings, which seldom say.
        open_videos: video files kept open in each process.

    Raises:
        UserError: the path is no dataset of that format, its files are missing or disagree with each other,
            or an argument does not fit it. All of this is found here, before anything is read for training.
    """
    options = {k: v for k, v in locals().items() if k not in ("path", "episodes")}
    if format not in FORMATS:
        raise unknown("dataset format", format, FORMATS)
    if Path(path).suffix in (".yaml", ".yml"):

        def open_one(part: str | Path, **own) -> Dataset:
            found = local_path(part)
            return open_dataset(found, **{**options, "format": guess_format(found), **own})

        return open_mixture(path, open_one, episodes)
    local = local_path(path)
    if format == "lerobot_datasets":
        if guess_format(local) == "hdf5_datasets":
            raise UserError(f"{local} holds HDF5 recordings: read it as hdf5_datasets (--dataset-format).")
        return LeRobotReader(
            local,
            version=version,
            episodes=episodes,
            split=split,
            video_backend=video_backend,
            action_key=action_key,
            state_key=state_key,
            language_key=language_key,
            image_layout=image_layout,
            open_videos=open_videos,
        )
    options = Options(
        action_key=None if action_key == ACTION else action_key,
        state_key=None if state_key == STATE else state_key,
        language_key=language_key,
        fps=fps,
    )
    return open_recordings(local, hdf5_layout, options, episodes, split)


def guess_format(path: Path) -> str:
    """The format at `path` by the files there: HDF5 files and no ``meta`` folder are HDF5, all else is LeRobot."""
    hdf5 = path.suffix in SUFFIXES or (path.is_dir() and not (path / "meta").is_dir() and bool(hdf5_files(path)))
    return "hdf5_datasets" if hdf5 else "lerobot_datasets"


def local_path(path: str | Path) -> Path:
    """`path` if it exists, else the local copy of the hub dataset of that id (fetched when it is not in the
    cache)."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    if not _HUB_ID.match(str(path)):
        raise UserError(f"Dataset path '{path}' does not exist.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"Dataset '{path}' is not a local folder; to fetch it from the hub, install huggingface_hub "
            "(pip install vlaforge[hub])."
        ) from None
    try:
        return Path(snapshot_download(str(path), repo_type="dataset"))
    except Exception as error:  # the hub's client raises many classes: offline, not found, gated, time-out
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"Dataset '{path}' is not a local folder, and the Hugging Face hub did not give it ({cause}). "
            "Without a network, copy it to this machine and give its path."
        ) from None
