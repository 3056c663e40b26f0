"""The check of a LeRobot dataset. It goes on after a defect, so that one pass names them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from vlaforge.data.check.columns import (
    check_constant,
    check_duplicates,
    check_statistics,
    check_timestamps,
    check_values,
    digest,
)
from vlaforge.data.check.findings import Report, brief
from vlaforge.data.check.video import check_videos
from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.features import Features, dimension_names, parse_features
from vlaforge.data.readers.lerobot.files import read_schema, read_table
from vlaforge.data.readers.lerobot.images import PictureStore
from vlaforge.data.readers.lerobot.layouts import Entry, Layout, open_layout
from vlaforge.data.readers.lerobot.rows import place_of, to_numpy
from vlaforge.data.readers.lerobot.stored import Statistics
from vlaforge.data.schema import ACTION, STATE

_ORDER = ("episode_index", "frame_index", "index", "task_index", "timestamp")


@dataclass
class _Seen:
    """What the pass over the rows keeps: vectors by column and episode, for what is checked over the whole."""

    vectors: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    used_tasks: set[int] = field(default_factory=set)


def check_lerobot(report: Report, path: Path, version: str | None, backend: str | None, frames: str) -> None:
    """Adds to `report` what is wrong with the dataset at `path`. UserError when it is no LeRobot dataset at all."""
    try:
        layout = open_layout(path, version)
        features = parse_features(layout.info["features"])
        entries = layout.entries(features.videos)
        tasks = layout.tasks()
    except UserError as error:
        if not (path / "meta").is_dir():
            raise
        report.add("files", str(error), "meta")
        return
    report.looked += [f"LeRobot {layout.version}", f"{len(entries)} episodes", f"{len(features.videos)} videos each"]
    _check_table(report, layout, entries, tasks)
    filled = [entry for entry in entries if entry.length > 0]
    seen = _check_files(report, layout, features, filled, tasks)
    _check_whole(report, layout, features, entries, seen)
    check_videos(report, path, layout, features, filled, backend, frames)
    _check_pictures(report, path, features, filled, seen, frames)


# ---------------------------------------------------------------------------------------------------- episode table


def _check_table(report: Report, layout: Layout, entries: list[Entry], tasks: Mapping[int, str]) -> None:
    file = layout.files[0]
    seen: dict[int, int] = {}
    for entry in entries:
        if entry.index in seen:
            report.add("episodes", "is listed twice", file, entry.index)
        seen[entry.index] = entry.length
        if entry.length <= 0:
            report.add("episodes", f"has length {entry.length}", file, entry.index)
        end = entry.extra.get("dataset_to_index")
        if end is not None and end - entry.start != entry.length:
            message = f"has length {entry.length}, but takes rows {entry.start} to {end - 1} of the dataset"
            report.add("episodes", message, file, entry.index)
        foreign = [task for task in entry.tasks if task not in tasks.values()]
        if foreign:
            report.add("tasks", f"has the task '{foreign[0]}', which the list of tasks lacks", file, entry.index)
    ordered = sorted(entries, key=lambda entry: entry.start)
    for before, after in pairwise(ordered):
        if before.start + before.length > after.start:
            message = f"starts at row {after.start}, inside episode {before.index}"
            report.add("episodes", message, file, after.index)
    info = layout.info
    totals = {
        "total_episodes": len(entries),
        "total_frames": sum(entry.length for entry in entries),
        "total_tasks": len(tasks),
    }
    for name, count in totals.items():
        if name in info and info[name] != count:
            report.add("episodes", f"{name} is {info[name]}, but the metadata lists {count}", "meta/info.json")


# ---------------------------------------------------------------------------------------------------- rows


def _check_files(
    report: Report, layout: Layout, features: Features, entries: list[Entry], tasks: Mapping[int, str]
) -> _Seen:
    seen = _Seen()
    by_file: dict[str, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.data, []).append(entry)
    for name, members in by_file.items():
        try:
            names = set(read_schema(layout.root / name).names)
            table = read_table(layout.root / name, [key for key in features.columns if key in names])
        except UserError as error:
            for entry in members:
                report.add("files", str(error), name, entry.index)
            continue
        columns = _columns(report, features, table, name)
        for entry in members:
            _check_episode(report, layout, entry, columns, table.num_rows, tasks, seen)
        if "episode_index" in columns:
            strays = sorted(set(np.unique(columns["episode_index"]).tolist()) - {entry.index for entry in members})
            if strays:
                message = f"holds rows of episodes {brief(strays)}, which the metadata has not in this file"
                report.add("rows", message, name, warning=True)
    for stray in sorted(_stored(layout.root, "data", ".parquet") - set(by_file)):
        report.add("files", "is not used by any episode", stray, warning=True)
    return seen


def _columns(report: Report, features: Features, table: pa.Table, name: str) -> dict[str, np.ndarray]:
    """The columns as arrays, and findings for those that are missing or not what info.json says."""
    columns: dict[str, np.ndarray] = {}
    for key, entry in features.columns.items():
        if key not in table.schema.names:
            report.add("types", f"lacks column '{key}', which info.json lists", name)
            continue
        try:
            columns[key] = values = to_numpy(table[key], f"column '{key}'")
        except UserError as error:
            report.add("types", str(error), name)
            continue
        shape = tuple(entry.get("shape") or ())
        found = values.shape[1:] or (1,)
        if shape and found != shape and values.dtype != object:
            report.add("types", f"column '{key}' has shape {list(found)}; info.json says {list(shape)}", name)
        if not _same_dtype(str(entry["dtype"]), values.dtype):
            report.add("types", f"column '{key}' has dtype {values.dtype}; info.json says {entry['dtype']}", name)
    return columns


def _same_dtype(declared: str, found: np.dtype) -> bool:
    return found.kind == "O" if declared in ("string", "str", "language") else declared == str(found)


def _check_episode(
    report: Report,
    layout: Layout,
    entry: Entry,
    columns: Mapping[str, np.ndarray],
    rows: int,
    tasks: Mapping[int, str],
    seen: _Seen,
) -> None:
    try:
        place = place_of(entry, columns, rows, Path(entry.data))
    except UserError as error:
        report.add("rows", str(error), entry.data, entry.index)
        return
    own = {key: values[place] for key, values in columns.items()}
    if isinstance(place, np.ndarray):
        report.add("rows", "its rows are not in order in the file", entry.data, entry.index, warning=True)
    if "index" in own and not np.array_equal(
        own["index"].reshape(-1), np.arange(entry.start, entry.start + entry.length)
    ):
        first = int(own["index"].reshape(-1)[0])
        message = f"column 'index' starts at {first}; expected {entry.start} to {entry.start + entry.length - 1}"
        report.add("rows", message, entry.data, entry.index)
    if "timestamp" in own:
        check_timestamps(report, own["timestamp"], float(layout.info["fps"]), entry.data, entry.index)
    if "task_index" in own:
        _check_tasks(report, entry, own["task_index"].reshape(-1), tasks, seen)
    for key, values in own.items():
        check_values(report, key, values, entry.data, entry.index)
        if key not in _ORDER and values.dtype.kind in "fiub" and values.ndim <= 2:
            seen.vectors.setdefault(key, {})[entry.index] = values
    vectors = {key: held[entry.index] for key, held in seen.vectors.items() if entry.index in held}
    if vectors:
        seen.digests[entry.index] = digest(vectors)
    seen.files[entry.index] = entry.data


def _check_tasks(report: Report, entry: Entry, numbers: np.ndarray, tasks: Mapping[int, str], seen: _Seen) -> None:
    used = set(np.unique(numbers).tolist())
    seen.used_tasks |= used
    foreign = sorted(used - set(tasks))
    if foreign:
        message = f"task numbers {brief(foreign)} are not in the list of tasks ({brief(sorted(tasks))})"
        report.add("tasks", message, entry.data, entry.index)
        return
    texts = {tasks[number] for number in used}
    if entry.tasks and texts - set(entry.tasks):
        message = f"its rows have the task '{min(texts - set(entry.tasks))}', its metadata '{entry.tasks[0]}'"
        report.add("tasks", message, entry.data, entry.index)


# ---------------------------------------------------------------------------------------------------- the whole


def _check_whole(report: Report, layout: Layout, features: Features, entries: list[Entry], seen: _Seen) -> None:
    for key in (ACTION, STATE, "actions", "state"):
        held = seen.vectors.get(key)
        if held:
            names = dimension_names(features.columns.get(key))
            files = sorted({seen.files[episode] for episode in held})
            widths = {values.shape[1:] for values in held.values()}
            if len(widths) == 1:
                check_constant(report, key, list(held.values()), names, brief(files, 1), list(held))
    check_duplicates(report, seen.digests, seen.files)
    try:
        whole, episodes = layout.statistics(), layout.episode_statistics()
    except UserError as error:
        report.add("statistics", str(error).removesuffix("."), layout.statistics_file)
        return
    if whole:
        _check_statistics(report, "meta/stats.json", whole, seen)
    if episodes:
        _check_episode_statistics(report, layout, entries, episodes, seen)
    if not whole and not episodes:
        report.add("statistics", "there are none; training computes its own", layout.statistics_file, warning=True)


def _check_statistics(report: Report, file: str, stored: Statistics, seen: _Seen) -> None:
    for key, held in seen.vectors.items():
        if key in stored and len({values.shape[1:] for values in held.values()}) == 1:
            check_statistics(report, key, stored[key], np.concatenate(list(held.values())), file)


def _check_episode_statistics(
    report: Report, layout: Layout, entries: list[Entry], stored: list[Statistics], seen: _Seen
) -> None:
    file = layout.statistics_file if layout.version == "v2.1" else layout.files[0]
    if len(stored) != len(entries):
        report.add("statistics", f"has statistics of {len(stored)} episodes, but there are {len(entries)}", file)
    for entry, statistics in zip(entries, stored):
        for key, held in seen.vectors.items():
            if key in statistics and entry.index in held:
                check_statistics(report, key, statistics[key], held[entry.index], file, entry.index)


def _check_pictures(
    report: Report, path: Path, features: Features, entries: list[Entry], seen: _Seen, frames: str
) -> None:
    """Pictures stored in parquet: the first, middle and last of each episode (all of them with ``all``)."""
    keys = [key for name, key in features.camera_keys.items() if features.cameras[name].kind == "image"]
    if not keys or frames == "none":
        return
    sizes = {features.camera_keys[name]: (camera.height, camera.width) for name, camera in features.cameras.items()}
    store = PictureStore(path, {features.camera_keys[name]: layout for name, layout in features.layouts.items()})
    for entry in entries:
        if entry.index not in seen.files:
            continue
        columns = {"episode_index": read_table(path / entry.data, ["episode_index"])["episode_index"].to_numpy()}
        rows = np.flatnonzero(columns["episode_index"] == entry.index)
        chosen = rows if frames == "all" else rows[[0, len(rows) // 2, -1]]
        for key in keys:
            for row in chosen.tolist():
                try:
                    height, width, _ = store.picture(entry.data, row, key).shape
                except UserError as error:
                    report.add("files", str(error), entry.data, entry.index)
                    break
                if (height, width) != sizes[key]:
                    message = f"'{key}' is {height} x {width}; info.json says {sizes[key][0]} x {sizes[key][1]}"
                    report.add("types", message, entry.data, entry.index)
                    break


def _stored(root: Path, folder: str, suffix: str) -> set[str]:
    """Files with `suffix` anywhere under `folder`, relative to the dataset."""
    return {str(path.relative_to(root)) for path in (root / folder).rglob(f"*{suffix}")}
