"""LeRobot v2.0 → v2.1 → v3.0. Videos are copied packet by packet; rows keep their types."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vlaforge.data.convert.summary import Pixels, of_rows, plain, sampled
from vlaforge.data.convert.writer import Limits, NewEpisode, V30Writer, write_json
from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.files import read_table
from vlaforge.data.readers.lerobot.layouts import Entry
from vlaforge.data.readers.lerobot.reader import LeRobotReader
from vlaforge.data.schema import IMAGES, DataNeeds

Say = Callable[[str], None]
_DROPPED = ("codebase_version", "total_chunks", "total_videos", "splits", "features")


def to_v21(reader: LeRobotReader, work: Path, say: Say) -> None:
    """Copies a v2.0 dataset into the folder `work` and gives it the statistics of each episode that v2.1 has."""
    source = reader.root
    left_out = (Path("meta/stats.json"), Path("meta/info.json"))  # the second comes last: without it this is no dataset
    for path in source.rglob("*"):
        if path.is_file() and path.relative_to(source) not in left_out:
            copy = work / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    lines = []
    for number, entry in enumerate(reader.entries):
        statistics = {key: of_rows(values) for key, values in _measured(reader, number).items()}
        statistics |= {key: pixels.result() for key, pixels in _pixels(reader, number).items()}
        lines.append(json.dumps({"episode_index": entry.index, "stats": plain(statistics)}, ensure_ascii=False))
        _progress(say, number, len(reader.entries))
    (work / "meta/episodes_stats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    info = json.loads((source / "meta/info.json").read_text(encoding="utf-8"))
    write_json(work / "meta/info.json", {**info, "codebase_version": "v2.1"})


def to_v30(reader: LeRobotReader, work: Path, limits: Limits, say: Say) -> None:
    """Writes a v2.0 or v2.1 dataset as v3.0 into the folder `work`. Episodes are numbered from 0 without gaps."""
    info = reader.layout.info
    writer = V30Writer(
        work,
        features=info["features"],
        fps=reader.info.fps,
        tasks=_task_list(reader),
        robot_type=reader.info.robot_type,
        limits=limits,
        extra={key: value for key, value in info.items() if key not in _DROPPED},
    )
    for number, (entry, table) in enumerate(_tables(reader)):
        videos = {key: reader.root / part.path for key, part in entry.videos.items()}
        writer.add(NewEpisode(table, entry.tasks, videos, _pixels(reader, number), _measured(reader, number)))
        _progress(say, number, len(reader.entries))
    writer.finish()


def _task_list(reader: LeRobotReader) -> list[str]:
    """Texts in the order of their numbers. UserError where the numbers have gaps, which v3.0 cannot have."""
    tasks = reader.layout.tasks()
    if sorted(tasks) != list(range(len(tasks))):
        raise UserError(f"{reader.root}: the tasks are not numbered from 0 to {len(tasks) - 1}; v3.0 needs that.")
    return [tasks[number] for number in range(len(tasks))]


def _tables(reader: LeRobotReader) -> Iterator[tuple[Entry, pa.Table]]:
    """Each episode's rows; pictures that lie beside the parquet file are taken into it."""
    for entry, place in zip(reader.entries, reader.rows.places):
        table = read_table(reader.root / entry.data)
        rows = np.arange(place.start, place.stop) if isinstance(place, slice) else place
        table = table.take(pa.array(rows)) if table.num_rows != entry.length else table
        for key in reader.features.camera_keys.values():
            if key in table.schema.names and pa.types.is_struct(table.schema.field(key).type):
                table = _embedded(table, key, reader.root)
        yield entry, table


def _embedded(table: pa.Table, key: str, root: Path) -> pa.Table:
    at = table.schema.get_field_index(key)
    cells: list[dict[str, Any]] = table[key].to_pylist()
    if all(cell.get("bytes") for cell in cells):
        return table
    filled = [{**cell, "bytes": cell.get("bytes") or (root / cell["path"]).read_bytes()} for cell in cells]
    return table.set_column(at, table.schema.field(at), pa.array(filled, table.schema.field(at).type))


def _measured(reader: LeRobotReader, number: int) -> dict[str, np.ndarray]:
    """The numeric columns of episode `number` of the reader."""
    keys = [key for key in reader.features.columns if key in reader.rows.schema.names]
    columns = {key: reader.column(key, reader.episodes[number]) for key in keys}
    return {key: values for key, values in columns.items() if values.dtype.kind in "fiub"}


def _pixels(reader: LeRobotReader, number: int) -> dict[str, Pixels]:
    """Pixel counts of some frames of each camera, in episode `number` of the reader."""
    first = reader.rows.offsets[number]
    positions = [first + frame for frame in sampled(reader.entries[number].length)]
    samples = reader.get_many(positions, DataNeeds())
    found = {}
    for name, key in reader.features.camera_keys.items():
        found[key] = Pixels()
        found[key].add(np.stack([sample[IMAGES + name] for sample in samples]))
    return found


def _progress(say: Say, number: int, total: int) -> None:
    if (number + 1) % 50 == 0 or number + 1 == total:
        say(f"{number + 1} of {total} episodes")
