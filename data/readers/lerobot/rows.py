"""The rows of the selected episodes: parquet columns as numpy arrays, the episodes one after the other.

Which rows of a file are an episode's is decided by the file's own ``episode_index`` column and compared with
the metadata. A dataset whose metadata points to another file, or another number of rows, is refused rather
than read wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.readers.lerobot.files import read_schema, read_table
from vlaforge.data.readers.lerobot.layouts import CHECK, Entry

_READERS = 8  # threads that read files; on network disks the wait is the cost


class Rows:
    """Columns over `entries`, in their order: row n of a column is the n-th frame of all of them together."""

    def __init__(self, root: Path, entries: Sequence[Entry]):
        self.root, self.entries = root, entries
        self.offsets = [0, *accumulate(entry.length for entry in entries)]
        self._files: dict[str, list[int]] = {}
        for number, entry in enumerate(entries):
            self._files.setdefault(entry.data, []).append(number)
        self.schema = read_schema(root / next(iter(self._files)))
        self._columns: dict[str, np.ndarray] = {}
        self.places: list[slice | np.ndarray] = [slice(0)] * len(entries)
        """For each entry, its rows in its file."""
        self._over_files(self._locate)

    def __len__(self) -> int:
        return self.offsets[-1]

    def column(self, key: str) -> np.ndarray:
        """Column `key` [rows, ...]: numbers and booleans in their own dtype, text as objects."""
        if key not in self._columns:
            self.load([key])
        return self._columns[key]

    def load(self, keys: Sequence[str]) -> None:
        """Reads the columns `keys` in one pass over the files."""
        for key in keys:
            if key not in self.schema.names:
                raise unknown("column", key, self.schema.names)
        parts: list[Mapping[str, np.ndarray]] = [{}] * len(self.entries)

        def read(path: str, numbers: list[int]) -> None:
            table = read_table(self.root / path, list(keys))
            arrays = {key: to_numpy(table[key], f"column '{key}' of {self.root / path}") for key in keys}
            for number in numbers:
                parts[number] = {key: array[self.places[number]] for key, array in arrays.items()}

        self._over_files(read)
        for key in keys:
            pieces = [part[key] for part in parts]
            shapes = {piece.shape[1:] for piece in pieces}
            if len(shapes) > 1:
                raise UserError(f"Column '{key}' of {self.root} has rows of shapes {sorted(shapes)}: {CHECK}.")
            self._columns[key] = np.concatenate(pieces)

    def _over_files(self, work) -> None:
        with ThreadPoolExecutor(min(_READERS, len(self._files))) as threads:
            for _ in threads.map(lambda item: work(*item), self._files.items()):
                pass

    def _locate(self, path: str, numbers: list[int]) -> None:
        keys = [key for key in ("episode_index", "frame_index") if key in self.schema.names]
        table = read_table(self.root / path, keys or None)
        columns = {key: table[key].to_numpy() for key in keys}
        for number in numbers:
            self.places[number] = place_of(self.entries[number], columns, table.num_rows, self.root / path)


def place_of(entry: Entry, columns: Mapping[str, np.ndarray], rows: int, path: Path) -> slice | np.ndarray:
    """The rows of `path` that are `entry`'s frames, in order. UserError where file and metadata disagree."""
    episodes = columns.get("episode_index")
    found = np.arange(rows) if episodes is None else np.flatnonzero(episodes == entry.index)
    if len(found) != entry.length:
        others = "" if episodes is None else f" (it holds episodes {_brief(np.unique(episodes))})"
        raise UserError(
            f"Episode {entry.index} has {entry.length} rows in its metadata, but {path} holds {len(found)} "
            f"rows of it{others}: {CHECK}."
        )
    frames = columns.get("frame_index")
    if frames is not None:
        found = found[np.argsort(frames[found], kind="stable")]
        if not np.array_equal(frames[found], np.arange(entry.length)):
            raise UserError(f"Episode {entry.index}: frame_index in {path} is not 0..{entry.length - 1}: {CHECK}.")
    if len(found) and np.array_equal(found, np.arange(found[0], found[0] + len(found))):
        return slice(int(found[0]), int(found[0]) + len(found))
    return found


def to_numpy(column: pa.ChunkedArray, what: str) -> np.ndarray:
    """[rows, ...]: nested lists of equal lengths become axes, text becomes an object array, missing numbers
    NaN.

    Raises UserError naming `what` for lists of unequal lengths and for types that are neither numbers nor
    text.
    """
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) and array.num_chunks else array
    if isinstance(array, pa.ChunkedArray):  # no rows at all
        return np.zeros(0)
    shape = [len(array)]
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_fixed_size_list(array.type):
            size, inner = array.type.list_size, array.flatten()
        elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
            if array.null_count:
                row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
                raise UserError(f"{what}: {array.null_count} of its {len(array)} rows are empty, first {row}: {CHECK}.")
            if len(lengths) > 1:
                raise UserError(f"{what}: its lists have unequal lengths ({_brief(lengths)}): {CHECK}.")
            size, inner = int(lengths[0]) if len(lengths) else 0, array.flatten()
        else:
            break
        shape.append(size)
        array = inner
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)) and not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ):
        raise UserError(f"{what}: type {kind} is neither numbers nor text.")
    values = array.to_numpy(zero_copy_only=False)
    if values.size != int(np.prod(shape)):
        raise UserError(f"{what}: some rows are missing: {CHECK}.")
    return values.reshape(shape)


def _brief(values: np.ndarray) -> str:
    listed = values.tolist()
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
