"""Where each LeRobot version keeps its episodes, tasks, rows, videos and statistics.

A layout turns a version's metadata into one logical table of `Entry`; nothing else in the reader knows the
version.
Time occurs only here: v3.0 stores where an episode starts in a shared video as seconds, which becomes a frame
number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.files import read_json, read_lines, read_schema, read_table
from vlaforge.data.readers.lerobot.info import read_info
from vlaforge.data.readers.lerobot.stored import Statistics, checked
from vlaforge.data.video import Expected

CHECK = "run `forge-data check` on it for the whole list"


@dataclass(frozen=True)
class VideoPart:
    """An episode's part of a video: `path` relative to the dataset, `start` in frames, and what the file must hold."""

    path: str
    start: int
    file: Expected


@dataclass(frozen=True)
class Entry:
    """One episode as its metadata has it; `data` is its parquet file relative to the dataset, videos by
    feature key."""

    index: int
    length: int
    start: int
    tasks: tuple[str, ...]
    data: str
    videos: Mapping[str, VideoPart]
    extra: Mapping[str, Any] = field(default_factory=dict)


class Layout(ABC):
    """One version's metadata. `root` is the dataset's folder, `info` its info.json."""

    version: str
    files: tuple[str, ...]
    """Metadata beside info.json that must exist, relative to the dataset."""

    def __init__(self, root: Path, info: Mapping[str, Any]):
        self.root, self.info = root, info

    @abstractmethod
    def entries(self, video_keys: Iterable[str]) -> list[Entry]:
        """All episodes, in the order of the metadata."""

    @abstractmethod
    def tasks(self) -> dict[int, str]:
        """Task texts by task number."""

    statistics_file: str = "meta/stats.json"

    def statistics(self) -> Statistics | None:
        """Statistics of the whole dataset, by feature and name, float64; None when it carries none."""
        path = self.root / "meta/stats.json"
        found = read_json(path)
        return None if found is None else checked(found, str(path))

    def episode_statistics(self) -> list[Statistics]:
        """Statistics of each episode, in the order of the metadata; empty when it carries none."""
        return []

    def _path(self, kind: str, **values: Any) -> str:
        template = self.info.get(f"{kind}_path") or self.default_paths[kind]
        try:
            return template.format(**values)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"info.json of {self.root}: {kind}_path '{template}' does not fit {self.version}, whose "
                f"fields are {', '.join(values)} ({error})."
            ) from None

    default_paths: Mapping[str, str]


class _V2(Layout):
    """v2.0 and v2.1: one parquet and one video a camera for each episode, metadata in JSON lines."""

    default_paths = {
        "data": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }

    def entries(self, video_keys: Iterable[str]) -> list[Entry]:
        video_keys, chunk_size = list(video_keys), int(self.info.get("chunks_size") or 1000)
        entries, start = [], 0
        for line in read_lines(self.root / "meta/episodes.jsonl", {"episode_index": int, "length": int}):
            index, length = line.pop("episode_index"), line.pop("length")
            where, whole = {"episode_chunk": index // chunk_size, "episode_index": index}, Expected(length, length)
            videos = {key: VideoPart(self._path("video", video_key=key, **where), 0, whole) for key in video_keys}
            tasks = tuple(line.pop("tasks", None) or ())
            entries.append(Entry(index, length, start, tasks, self._path("data", **where), videos, line))
            start += length
        return entries

    def tasks(self) -> dict[int, str]:
        lines = read_lines(self.root / "meta/tasks.jsonl", {"task_index": int, "task": str})
        return {line["task_index"]: line["task"] for line in lines}


class V20(_V2):
    version, files = "v2.0", ("meta/episodes.jsonl", "meta/tasks.jsonl")


class V21(_V2):
    version, files = "v2.1", ("meta/episodes.jsonl", "meta/tasks.jsonl")
    statistics_file = "meta/episodes_stats.jsonl"

    def episode_statistics(self) -> list[Statistics]:
        path = self.root / self.statistics_file
        lines = read_lines(path, {"stats": dict}) if path.is_file() else []
        return [checked(line["stats"], f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


class V30(Layout):
    """v3.0: many episodes share a parquet file and a video; metadata is parquet."""

    version, files = "v3.0", ("meta/episodes", "meta/tasks.parquet")
    default_paths = {
        "data": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }

    def entries(self, video_keys: Iterable[str]) -> list[Entry]:
        video_keys = list(video_keys)
        rows = self._episode_rows(video_keys)
        parts: list[dict[str, tuple[str, int]]] = []
        files: dict[str, Expected] = {}
        for row in rows:
            parts.append({key: self._video(row, key) for key in video_keys})
            for path, start in parts[-1].values():
                held = files.get(path, Expected(0, 0))
                files[path] = Expected(held.rows + row["length"], max(held.end, start + row["length"]))
        entries = []
        for row, own in zip(rows, parts):
            videos = {key: VideoPart(path, start, files[path]) for key, (path, start) in own.items()}
            data = self._path("data", chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
            extra = {key: value for key, value in row.items() if "/" not in key and key not in _EPISODE[:4]}
            start, tasks = row["dataset_from_index"], tuple(row["tasks"] or ())
            entries.append(Entry(row["episode_index"], row["length"], start, tasks, data, videos, extra))
        return entries

    def _episode_rows(self, video_keys: list[str]) -> list[dict[str, Any]]:
        wanted = [*_EPISODE, "data/chunk_index", "data/file_index"]
        wanted += [
            f"videos/{key}/{name}" for key in video_keys for name in ("chunk_index", "file_index", "from_timestamp")
        ]
        rows: list[dict[str, Any]] = []
        for path in self._episode_files():
            names = [name for name in read_schema(path).names if not name.startswith("stats/")]
            missing = [name for name in wanted if name not in names and name != "tasks"]
            if missing:
                raise UserError(f"{path} lacks the columns {', '.join(missing)} of LeRobot {self.version}: {CHECK}.")
            table = read_table(path, names)
            for name in wanted:
                if name in names and name != "tasks":
                    check_numbers(path, name, table[name])
            rows += [{"tasks": (), **row} for row in table.to_pylist()]
        if not rows:
            raise UserError(f"{self.root / 'meta/episodes'} holds no chunk-*/file-*.parquet with episodes.")
        return rows

    def _video(self, row: Mapping[str, Any], key: str) -> tuple[str, int]:
        """(path, first frame) of an episode in its video."""
        at = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        seconds = row[f"videos/{key}/from_timestamp"]
        if not (isfinite(seconds) and seconds >= 0):
            where = f"episode {row['episode_index']} of {self.root / 'meta/episodes'}"
            raise UserError(f"{where} starts at {seconds} s of its video '{key}', which is no time: {CHECK}.")
        start = frame_of(seconds, self.info["fps"])
        return self._path("video", video_key=key, **at), start

    def tasks(self) -> dict[int, str]:
        """The text is the column ``task``, or the table's text index where a pandas index was written under
        another name."""
        path = self.root / "meta/tasks.parquet"
        table = read_table(path)
        texts = [name for name in table.schema.names if pa.types.is_string(table.schema.field(name).type)]
        texts += [name for name in table.schema.names if pa.types.is_large_string(table.schema.field(name).type)]
        if "task_index" not in table.schema.names or not texts:
            raise UserError(f"{path} has columns {', '.join(table.schema.names)}; expected task_index and task.")
        check_numbers(path, "task_index", table["task_index"])
        text = "task" if "task" in texts else texts[0]
        return dict(zip(table["task_index"].to_pylist(), table[text].to_pylist()))

    def episode_statistics(self) -> list[Statistics]:
        found: list[Statistics] = []
        for path in self._episode_files():
            table = read_table(path)
            names = [name for name in table.schema.names if name.startswith("stats/")]
            for row in table.select(names).to_pylist() if names else []:
                episode: dict[str, dict[str, Any]] = {}
                for name, value in row.items():
                    _, key, statistic = name.split("/", 2)
                    episode.setdefault(key, {})[statistic] = value
                found.append(checked(episode, f"{path}, row {len(found)}"))
        return found

    def _episode_files(self) -> list[Path]:
        return sorted((self.root / "meta/episodes").glob("chunk-*/file-*.parquet"))


_EPISODE = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
VERSIONS: dict[str, type[Layout]] = {layout.version: layout for layout in (V20, V21, V30)}


def check_numbers(path: Path, name: str, column: pa.ChunkedArray) -> None:
    """UserError when a column that tells where an episode lies holds gaps, or no numbers."""
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise UserError(f"{path}: column '{name}' has {column.null_count} gaps and type {column.type}: {CHECK}.")


def frame_of(seconds: float, fps: float) -> int:
    """The frame that starts nearest to `seconds`. Sums of float durations end a little under the true value:
    a floor would be one frame early."""
    return round(seconds * fps)


def detect(root: Path) -> str | None:
    """The version whose files lie under `root`, as far as their names tell; None when it is none of them."""
    if (root / "meta/episodes").is_dir() or (root / "meta/tasks.parquet").is_file():
        return "v3.0"
    if (root / "meta/episodes_stats.jsonl").is_file():
        return "v2.1"
    if any((root / f"meta/{name}.jsonl").is_file() for name in ("episodes", "tasks")):
        return "v2.0"
    return None


def open_layout(root: Path, version: str | None = None) -> Layout:
    """The layout of the dataset at `root`, by info.json.

    Raises UserError when it is no LeRobot dataset, its version is unknown or not the one asked for, or
    metadata is missing; the missing files are named, and the version whose files are there.
    """
    if version is not None and version not in VERSIONS:
        raise UserError(f"LeRobot version '{version}' is not supported: give one of {', '.join(VERSIONS)}.")
    like = detect(root)
    info = read_info(root / "meta/info.json")
    if info is None:
        seems = f"; what is there looks like LeRobot {like}" if like else ""
        raise UserError(f"{root} is not a LeRobot dataset: meta/info.json is missing{seems}.")
    found = str(info.get("codebase_version", "")) or "(none)"
    found = found if found.startswith("v") or found == "(none)" else f"v{found}"
    if found not in VERSIONS:
        raise UserError(f"{root} has codebase_version {found}; supported are {', '.join(VERSIONS)}.")
    if version is not None and version != found:
        raise UserError(
            f"{root} is LeRobot {found} by its info.json, not {version}: leave the version out to detect it."
        )
    absent = [key for key in ("fps", "features") if not info.get(key)]
    if absent:
        raise UserError(f"{root / 'meta/info.json'} lacks {' and '.join(absent)}.")
    layout = VERSIONS[found](root, info)
    missing = [name for name in layout.files if not (root / name).exists()]
    if missing:
        seems = f"; the files that are there look like {like}" if like and like != found else ""
        raise UserError(f"{root} (LeRobot {found} by its info.json) lacks {', '.join(missing)}{seems}.")
    return layout
