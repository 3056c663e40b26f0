"""What is checked when a dataset is opened: faults that would make a reader return something else than is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.files import read_schema, read_table
from vlaforge.data.readers.lerobot.layouts import CHECK, Entry


def by_number(root: Path, entries: Sequence[Entry]) -> dict[int, Entry]:
    """The episodes by their numbers. UserError when there is none, or one is listed twice or has an odd length."""
    found: dict[int, Entry] = {}
    if not entries:
        raise UserError(f"{root}: the metadata lists no episodes.")
    for entry in entries:
        if entry.length < 0:
            raise UserError(f"{root}: episode {entry.index} has length {entry.length} in the metadata; {CHECK}.")
        if entry.index in found:
            raise UserError(f"{root}: episode {entry.index} is listed twice in the metadata; {CHECK}.")
        found[entry.index] = entry
    return found


def without_empty(root: Path, entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    """(the episodes that have rows, a note on those that have none).

    UserError when no episode has any, or one has rows although its length is 0.
    """
    kept, empty = [], []
    for entry in entries:
        (kept if entry.length else empty).append(entry)
    if not kept:
        raise UserError(f"{root}: the chosen episodes have no rows ({len(empty)} of length 0).")
    for entry in empty:
        if (root / entry.data).is_file() and "episode_index" in read_schema(root / entry.data).names:
            numbers = read_table(root / entry.data, ["episode_index"])["episode_index"].to_numpy()
            if held := int((numbers == entry.index).sum()):
                raise UserError(
                    f"Episode {entry.index} has length 0 in its metadata, but {root / entry.data} holds {held} rows of "
                    f"it: {CHECK}."
                )
    listed = ", ".join(str(entry.index) for entry in empty)
    return kept, [f"episodes without rows are left out: {listed}"] if empty else []


def check_overlaps(root: Path, entries: Sequence[Entry]) -> None:
    """Episodes must not share rows of the dataset, nor frames of a video. UserError names the two."""
    spans: dict[str, list[tuple[int, int, int]]] = {"": [(e.start, e.length, e.index) for e in entries]}
    for entry in entries:
        for part in entry.videos.values():
            spans.setdefault(part.path, []).append((part.start, entry.length, entry.index))
    for path, parts in spans.items():
        parts.sort()
        for (start, length, index), (following, _, other) in pairwise(parts):
            if start + length > following:
                what = (
                    f"frames {start} to {start + length - 1} of {path}"
                    if path
                    else f"rows {start} to {start + length - 1}"
                )
                raise UserError(
                    f"{root}: episode {index} takes {what}, but episode {other} starts at {following}: "
                    f"the metadata is wrong; {CHECK}."
                )


def check_files(root: Path, entries: Sequence[Entry]) -> None:
    """Every parquet and video of the episodes exists; UserError names those that do not."""
    wanted = {entry.data for entry in entries} | {part.path for entry in entries for part in entry.videos.values()}
    listed: dict[str, set[str]] = {}
    missing = []
    for name in sorted(wanted):
        folder, file = os.path.split(name)
        if folder not in listed:
            where = root / folder
            listed[folder] = set(os.listdir(where)) if where.is_dir() else set()
        if file not in listed[folder]:
            missing.append(name)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UserError(f"{root} lacks {', '.join(missing[:5])}{more}, which its metadata names.")


def check_finite(root: Path, what: str, values: np.ndarray, entries: Sequence[Entry], offsets: Sequence[int]) -> None:
    """No NaN or infinity in `values` [rows, D], the rows of `entries` in turn. UserError names the first."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        number = int(np.searchsorted(offsets, bad[0], side="right")) - 1
        entry, frame = entries[number], int(bad[0]) - offsets[number]
        raise UserError(
            f"{root / entry.data}: the {what} of episode {entry.index} is NaN or infinite at frame {frame} "
            f"({len(bad)} rows in all): leave the episode out with --episodes, or repair it; {CHECK}."
        )


def check_width(root: Path, keys: Sequence[str], columns: Mapping[str, Mapping[str, Any]], values: np.ndarray) -> None:
    """The columns `keys`, side by side in `values` [rows, D], are as wide as info.json (`columns`) says."""
    shapes = [(columns.get(key) or {}).get("shape") for key in keys]
    if all(shapes) and sum(math.prod(shape) for shape in shapes) != values.shape[1]:
        said = ", ".join(f"'{key}' has shape {shape}" for key, shape in zip(keys, shapes))
        raise UserError(
            f"{root}: by its info.json {said}, but its rows hold {values.shape[1]} values: the metadata is not this "
            f"data's; {CHECK}."
        )
