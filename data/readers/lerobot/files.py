"""JSON, JSON lines and parquet, with an error that names the file (and line)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlaforge.data.errors import UserError


def read_schema(path: Path) -> pa.Schema:
    """The columns of a parquet file. UserError when it is missing or damaged."""
    try:
        return pq.read_schema(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def read_json(path: Path) -> Any | None:
    """The content of a JSON file, None when there is no such file. UserError when it is not JSON."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None


def read_lines(path: Path, required: tuple[str, ...]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each with the keys `required`. UserError names file and line."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            lacking = [key for key in required if key not in line]
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {number}, is not valid JSON: {error}.") from None
        if lacking:
            raise UserError(f"{path}, line {number}, lacks {', '.join(lacking)}.")
        lines.append(line)
    return lines


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A parquet file. UserError when it is missing or damaged, or lacks one of `columns`."""
    try:
        # As a stream of one file: a folder named like key=value must not be taken for a partition column.
        with pq.ParquetFile(path) as file:
            lacking = [key for key in columns or () if key not in file.schema_arrow.names]
            if lacking:
                raise UserError(f"{path} lacks the column '{lacking[0]}', which other files of the dataset have.")
            return file.read(columns=columns, use_threads=False)
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
