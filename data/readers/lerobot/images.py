"""Pictures stored inside parquet: read a row group at a time, the last ones kept."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.rows import to_numpy
from vlaforge.data.readers.pictures import as_rgb, decode_picture
from vlaforge.data.video.errors import DecodeError

_BUDGET = 1 << 30  # bytes of row groups kept, per process: small datasets then lie in memory as a whole


class PictureStore:
    """Pictures by (file, row, column). A cell holds an encoded picture, its path, or raw pixels.

    Args:
        root: the dataset's folder, which paths in cells are relative to.
        layouts: feature key → ``hwc`` or ``chw``, for raw pixels.
    """

    def __init__(self, root: Path, layouts: dict[str, str]):
        self.root, self.layouts = root, layouts
        self._groups: OrderedDict[tuple[str, int, str], pa.Array | np.ndarray] = OrderedDict()
        self._held = 0
        self._ends: dict[str, list[int]] = {}

    def __getstate__(self) -> dict:
        return {"root": self.root, "layouts": self.layouts}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)

    def picture(self, path: str, row: int, key: str) -> np.ndarray:
        """uint8 [H, W, 3] of column `key` in row `row` of the parquet file `path`. DecodeError names them."""
        where = f"'{key}', row {row} of {self.root / path}"
        group, inside = self._place(path, row)
        cells = self._cells(path, group, key)
        if isinstance(cells, np.ndarray):
            return as_rgb(cells[inside], self.layouts[key], where)
        cell = cells[inside].as_py()
        data, name = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is None and name:
            try:
                data = (self.root / name).read_bytes()
            except OSError as error:
                raise DecodeError(f"The picture of {where} cannot be read: {error}") from error
        if not data:
            raise DecodeError(f"There is no picture in {where}.")
        return decode_picture(data, where)

    def _place(self, path: str, row: int) -> tuple[int, int]:
        ends = self._ends.get(path)
        if ends is None:
            with pq.ParquetFile(self.root / path) as file:
                counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            ends = self._ends[path] = list(accumulate(counts))
        group = bisect_right(ends, row)
        return group, row - (ends[group - 1] if group else 0)

    def _cells(self, path: str, group: int, key: str) -> pa.Array | np.ndarray:
        at = (path, group, key)
        cells = self._groups.get(at)
        if cells is not None:
            self._groups.move_to_end(at)
            return cells
        with pq.ParquetFile(self.root / path) as file:
            if key not in file.schema_arrow.names:
                raise UserError(f"{self.root / path} has no column '{key}', which info.json lists as images.")
            column = file.read_row_group(group, columns=[key], use_threads=False)[key].combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = column.chunk(0)
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        encoded = pa.types.is_struct(column.type) or pa.types.is_binary(column.type)
        cells = column if encoded else to_numpy(pa.chunked_array([column]), f"'{key}' of {self.root / path}")
        self._keep(at, cells)
        return cells

    def _keep(self, at: tuple[str, int, str], cells: pa.Array | np.ndarray) -> None:
        self._groups[at] = cells
        self._held += cells.nbytes
        while self._held > _BUDGET and len(self._groups) > 1:
            self._held -= self._groups.popitem(last=False)[1].nbytes
