"""Writes a LeRobot v3.0 dataset, episode by episode, into an empty folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlaforge.data.convert.summary import Pixels, of_rows, plain, pooled
from vlaforge.data.convert.video import JoinedVideo

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-000/file-000.parquet"
_MB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """When a new file is begun: at this size in MB; files in a chunk folder."""

    data_mb: float = 100
    video_mb: float = 200
    chunk: int = 1000


@dataclass
class NewEpisode:
    """One episode to write.

    Args:
        table: its rows, without the columns that the writer numbers itself.
        videos: feature key → an mp4 with one frame a row.
        pixels: feature key of a camera → counts of its sampled pictures.
        measured: feature key → rows that statistics are taken of.
    """

    table: pa.Table
    tasks: tuple[str, ...]
    videos: Mapping[str, Path]
    pixels: Mapping[str, Pixels]
    measured: Mapping[str, np.ndarray]


@dataclass
class _Place:
    """The file that is being filled, by chunk and number."""

    chunk: int = 0
    file: int = 0

    def next(self, per_chunk: int) -> _Place:
        return _Place(self.chunk, self.file + 1) if self.file + 1 < per_chunk else _Place(self.chunk + 1, 0)

    @property
    def values(self) -> dict[str, int]:
        return {"chunk_index": self.chunk, "file_index": self.file}


@dataclass
class _Camera:
    video: JoinedVideo
    place: _Place = field(default_factory=_Place)


class V30Writer:
    """`add` each episode in turn, then `finish`. Row and episode numbers are given out in that order."""

    def __init__(
        self,
        root: Path,
        *,
        features: Mapping[str, Mapping[str, Any]],
        fps: float,
        tasks: Sequence[str],
        robot_type: str | None,
        limits: Limits | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        self.root, self.features, self.fps = root, features, fps
        self.tasks, self.robot_type = list(tasks), robot_type
        self.limits, self.extra = limits or Limits(), dict(extra or {})
        self._rows: list[dict[str, Any]] = []
        self._measured: dict[str, list[np.ndarray]] = {}
        self._pixels: dict[str, Pixels] = {}
        self._count = 0
        self._place, self._parquet = _Place(), None
        self._cameras: dict[str, _Camera] = {}

    def add(self, episode: NewEpisode) -> None:
        length, index = episode.table.num_rows, len(self._rows)
        row: dict[str, Any] = {"episode_index": index, "tasks": list(episode.tasks), "length": length}
        row |= self._write_rows(episode.table, index)
        row |= {"dataset_from_index": self._count, "dataset_to_index": self._count + length}
        for key, source in episode.videos.items():
            row |= self._write_video(key, source, length)
        statistics = {key: of_rows(values) for key, values in episode.measured.items()}
        statistics |= {key: pixels.result() for key, pixels in episode.pixels.items()}
        for key, entry in plain(statistics).items():
            row |= {f"stats/{key}/{name}": value for name, value in entry.items()}
        row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        self._rows.append(row)
        self._count += length
        for key, values in episode.measured.items():
            self._measured.setdefault(key, []).append(values)
        for key, pixels in episode.pixels.items():
            self._pixels.setdefault(key, Pixels()).merge(pixels)

    def _write_rows(self, table: pa.Table, index: int) -> dict[str, int]:
        """Appends the rows as a row group of their own; begins the next file when this one is full."""
        length = table.num_rows
        table = _set(table, "episode_index", np.full(length, index))
        table = _set(table, "index", np.arange(self._count, self._count + length))
        path = self._data_path()
        if self._parquet is not None and path.stat().st_size > self.limits.data_mb * _MB:
            self._parquet.close()
            self._place, self._parquet = self._place.next(self.limits.chunk), None
            path = self._data_path()
        if self._parquet is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._parquet = pq.ParquetWriter(path, table.schema)
        self._parquet.write_table(table, row_group_size=length)
        return {f"data/{name}": value for name, value in self._place.values.items()}

    def _data_path(self) -> Path:
        return self.root / DATA_PATH.format(**self._place.values)

    def _write_video(self, key: str, source: Path, length: int) -> dict[str, Any]:
        camera = self._cameras.get(key)
        if camera is None:
            camera = self._cameras[key] = _Camera(self._video(key, _Place()))
        if camera.video.bytes > self.limits.video_mb * _MB or not camera.video.takes(source):
            camera.video.close()
            camera.place = camera.place.next(self.limits.chunk)
            camera.video = self._video(key, camera.place)
        start = camera.video.append(source, length)
        row = {f"videos/{key}/{name}": value for name, value in camera.place.values.items()}
        row[f"videos/{key}/from_timestamp"] = start / self.fps
        row[f"videos/{key}/to_timestamp"] = (start + length) / self.fps
        return row

    def _video(self, key: str, place: _Place) -> JoinedVideo:
        return JoinedVideo(self.root / VIDEO_PATH.format(video_key=key, **place.values), self.fps)

    def finish(self) -> None:
        """Writes the metadata and closes all files."""
        if self._parquet is not None:
            self._parquet.close()
        for camera in self._cameras.values():
            camera.video.close()
        meta = self.root / "meta"
        (self.root / EPISODES_PATH).parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._rows), self.root / EPISODES_PATH)
        pq.write_table(tasks_table(self.tasks), meta / "tasks.parquet")
        statistics = {key: pooled(parts) for key, parts in self._measured.items()}
        statistics |= {key: pixels.result() for key, pixels in self._pixels.items()}
        write_json(meta / "stats.json", plain(statistics))
        write_json(meta / "info.json", self._info())

    def _info(self) -> dict[str, Any]:
        has_video = any(entry["dtype"] == "video" for entry in self.features.values())
        return {
            **self.extra,
            "codebase_version": "v3.0",
            "robot_type": self.robot_type,
            "total_episodes": len(self._rows),
            "total_frames": self._count,
            "total_tasks": len(self.tasks),
            "chunks_size": self.limits.chunk,
            "data_files_size_in_mb": max(1, round(self.limits.data_mb)),
            "video_files_size_in_mb": max(1, round(self.limits.video_mb)),
            "fps": int(self.fps) if float(self.fps).is_integer() else self.fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if has_video else None,
            "features": self.features,
        }


def tasks_table(tasks: Sequence[str]) -> pa.Table:
    """Columns task_index and task, where task is marked as a pandas index: LeRobot looks tasks up by it."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})

    def column(name: str, kind: str, numpy: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}

    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False), encoding="utf-8")


def _set(table: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    """`table` with column `name` replaced (in its place and type) or added at the end."""
    if name not in table.schema.names:
        return table.append_column(name, pa.array(values, pa.int64()))
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
