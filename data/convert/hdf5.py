"""HDF5 recordings → LeRobot v3.0. Rows are kept as recorded; pictures become video, or stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from vlaforge.data.convert.summary import Pixels, sampled
from vlaforge.data.convert.video import encode, facts
from vlaforge.data.convert.writer import Limits, NewEpisode, V30Writer
from vlaforge.data.dataset import Episode
from vlaforge.data.readers.hdf5.reader import Hdf5Reader
from vlaforge.data.schema import ACTION, IMAGES, STATE

Say = Callable[[str], None]


def to_v30(reader: Hdf5Reader, work: Path, limits: Limits, say: Say, *, cameras: str, codec: str, crf: int) -> None:
    """Writes the recordings into the folder `work`.

    Args:
        cameras: ``video`` encodes the frames (with loss); ``image`` keeps JPEG and PNG as they are, and raw as PNG.
        codec, crf: of the encoder.
    """
    info = reader.info
    features = _features(reader, cameras)
    tasks = list(dict.fromkeys(reader.recordings[episode.index].task for episode in reader.episodes))
    writer = V30Writer(work, features=features, fps=info.fps, tasks=tasks, robot_type=info.robot_type, limits=limits)
    scratch = work / ".encoded"
    for number, episode in enumerate(reader.episodes):
        columns = _columns(reader, episode, tasks)
        videos: dict[str, Path] = {}
        pixels = {IMAGES + name: Pixels() for name in info.cameras}
        for name in info.cameras:
            for row in sampled(episode.length):
                pixels[IMAGES + name].add(reader.picture(episode, name, row)[None])
            if cameras == "video":
                videos[IMAGES + name] = path = scratch / f"{name}.mp4"
                encode(path, _frames(reader, episode, name), info.fps, codec, crf)
                features[IMAGES + name].setdefault("info", facts(path, info.fps))
        table = _table(reader, episode, columns, cameras)
        task = reader.recordings[episode.index].task
        writer.add(NewEpisode(table, (task,), videos, pixels, columns))
        for path in videos.values():
            path.unlink()
        say(f"{number + 1} of {len(reader.episodes)} episodes")
    if scratch.exists():
        scratch.rmdir()
    writer.finish()


def _features(reader: Hdf5Reader, cameras: str) -> dict[str, dict[str, Any]]:
    info = reader.info
    features: dict[str, dict[str, Any]] = {}
    for name, camera in info.cameras.items():
        shape = [camera.height, camera.width, 3]
        features[IMAGES + name] = {"dtype": cameras, "shape": shape, "names": ["height", "width", "channels"]}
    if info.state_dim:
        names = list(info.state_names) or None
        features[STATE] = {"dtype": "float32", "shape": [info.state_dim], "names": names}
    features[ACTION] = {"dtype": "float32", "shape": [info.action_dim], "names": list(info.action_names) or None}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for key in ("frame_index", "episode_index", "index", "task_index"):
        features[key] = {"dtype": "int64", "shape": [1], "names": None}
    return features


def _columns(reader: Hdf5Reader, episode: Episode, tasks: list[str]) -> dict[str, np.ndarray]:
    """Everything but episode_index and index, which the writer gives out."""
    task = tasks.index(reader.recordings[episode.index].task)
    columns = {STATE: reader.column(STATE, episode)} if reader.info.state_dim else {}
    columns[ACTION] = reader.column(ACTION, episode)
    columns["timestamp"] = (np.arange(episode.length) / reader.info.fps).astype(np.float32)
    columns["frame_index"] = np.arange(episode.length)
    columns["task_index"] = np.full(episode.length, task)
    return columns


def _table(reader: Hdf5Reader, episode: Episode, columns: dict[str, np.ndarray], cameras: str) -> pa.Table:
    arrays: dict[str, pa.Array] = {}
    if cameras == "image":
        for name in reader.info.cameras:
            cells = [{"bytes": _encoded(reader, episode, name, row), "path": None} for row in range(episode.length)]
            arrays[IMAGES + name] = pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    for key, values in columns.items():
        flat = pa.array(values.reshape(-1))
        arrays[key] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if values.ndim == 2 else flat
    return pa.table(arrays)


def _encoded(reader: Hdf5Reader, episode: Episode, camera: str, row: int) -> bytes:
    """The bytes of a picture as recorded, or PNG of raw pixels."""
    cell = reader.cell(episode, camera, row)
    if cell.ndim == 1:
        return bytes(cell)
    target = BytesIO()
    Image.fromarray(reader.picture(episode, camera, row)).save(target, "PNG")
    return target.getvalue()


def _frames(reader: Hdf5Reader, episode: Episode, camera: str) -> Iterator[np.ndarray]:
    for row in range(episode.length):
        yield reader.picture(episode, camera, row)
