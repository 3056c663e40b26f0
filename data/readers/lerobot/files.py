"""JSON, JSON lines and parquet, with an error that names the file (and line)."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0].rstrip('.')}.") from None


def read_text(path: Path) -> str:
    """UserError when the file cannot be read, or is not text."""
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors write a mark in front
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8: it is damaged.") from None


def read_json(path: Path) -> Any | None:
    """The content of a JSON file, None when there is no such file. UserError when it is not JSON."""
    if not path.is_file():
        return None
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None


def read_lines(path: Path, required: Mapping[str, type]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each with the keys `required` of these types. UserError names file and line."""
    lines = []
    for number, text in enumerate(read_text(path).split("\n"), start=1):  # not splitlines: texts may hold U+2028
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is not valid JSON: {error}.") from None
        if not isinstance(line, dict):
            raise UserError(f"{path}, line {number}, is not an object with {', '.join(required)}.")
        if lacking := [key for key in required if key not in line]:
            raise UserError(f"{path}, line {number}, lacks {', '.join(lacking)}.")
        for key, kind in required.items():
            if not isinstance(line[key], kind):
                raise UserError(f"{path}, line {number}: {key} is {line[key]!r:.60}; it must be {_WORDS[kind]}.")
        lines.append(line)
    return lines


_WORDS = {int: "an integer", str: "text", dict: "an object"}


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
        raise UserError(f"{path} cannot be read as parquet: {str(error).splitlines()[0].rstrip('.')}.") from None
