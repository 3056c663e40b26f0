"""info.json: whether it holds what a reader relies on, by type and range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.files import read_json


def read_info(path: Path) -> dict[str, Any] | None:
    """The content of info.json at `path`, None when there is no such file.

    Raises:
        UserError: it is no JSON object, or what a reader takes from it has another type or an impossible value; the
            first fault is named.
    """
    info = read_json(path)
    if info is None:
        return None
    if not isinstance(info, dict):
        raise UserError(f"{path} holds {_kind(info)}, not an object with the dataset's facts: restore the file.")
    for fault in _faults(info):
        raise UserError(f"{path}: {fault}.")
    return info


def _faults(info: Mapping[str, Any]) -> Iterator[str]:
    fps = info.get("fps")
    if fps and not (_number(fps) and fps > 0):
        yield f"fps is {fps!r}; it must be a number above 0"
    chunks = info.get("chunks_size")
    if chunks is not None and not (_integer(chunks) and chunks > 0):
        yield f"chunks_size is {chunks!r}; it must be an integer above 0"
    for name in ("data_path", "video_path", "robot_type"):
        if not isinstance(info.get(name), str | None):
            yield f"{name} is {_kind(info[name])}; it must be text"
    splits = info.get("splits") or {}
    if not isinstance(splits, Mapping) or not all(isinstance(span, str) for span in splits.values()):
        yield 'splits must map names to ranges of episodes, such as {"train": "0:10"}'
    features = info.get("features") or {}
    if not isinstance(features, Mapping):
        yield f"features is {_kind(features)}; it must map column names to their dtype and shape"
        return
    for key, entry in features.items():
        if fault := _feature_fault(entry):
            yield f"feature '{key}' {fault}"


def _feature_fault(entry: Any) -> str:
    if not isinstance(entry, Mapping):
        return f"is {_kind(entry)}; it must have a dtype and a shape"
    if not isinstance(entry.get("dtype"), str):
        return f"has {_kind(entry['dtype'])} as its dtype; it must be text" if "dtype" in entry else "lacks its dtype"
    shape = entry.get("shape")
    if shape is not None and not (isinstance(shape, list) and all(_integer(size) and size > 0 for size in shape)):
        return f"has the shape {shape!r}; it must be a list of sizes above 0"
    for name in ("info", "video_info"):
        if not isinstance(entry.get(name) or {}, Mapping):
            return f"has {_kind(entry[name])} as its {name}; it must be an object"
    return ""


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
