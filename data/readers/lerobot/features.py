"""What info.json says about a dataset's columns and cameras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlaforge.data.dataset import Camera
from vlaforge.data.errors import UserError

_PREFIXES = ("observation.images.", "observation.image.", "observation.")
_CHANNELS = (1, 3, 4)
_PICTURES = ("video", "image")
_STRUCTURED = (*_PICTURES, "language")  # LeRobot's annotated dialogues: lists of records, not read here


@dataclass(frozen=True)
class Features:
    """`cameras` by name; `camera_keys` name → feature key; `columns` key → entry of what holds numbers or text.

    `layouts` name → ``hwc`` or ``chw``; `videos` are the keys of all video features, depth maps too.
    """

    cameras: Mapping[str, Camera]
    camera_keys: Mapping[str, str]
    layouts: Mapping[str, str]
    columns: Mapping[str, Mapping[str, Any]]
    videos: tuple[str, ...]


def parse_features(features: Mapping[str, Mapping[str, Any]], image_layout: str | None = None) -> Features:
    """Sorts the entries of info.json.

    A camera is a feature of dtype ``video`` or ``image``, or an array of rank 3 with a channel axis of 1, 3
    or 4. Depth maps are not. Its name is the key without ``observation.images.`` (or the full key where two
    would be the same).
    """
    keys = [key for key, entry in features.items() if _is_camera(entry)]
    short = {key: _short(key) for key in keys}
    clash = {name for name in short.values() if list(short.values()).count(name) > 1}
    cameras, camera_keys, layouts = {}, {}, {}
    for key in keys:
        name = key if short[key] in clash else short[key]
        entry = features[key]
        kind = "video" if entry["dtype"] == "video" else "image"
        layout = _layout(key, entry, image_layout)
        shape = entry["shape"]
        height, width = (shape[0], shape[1]) if layout == "hwc" else (shape[1], shape[2])
        cameras[name] = Camera(name, int(height), int(width), kind)
        camera_keys[name], layouts[name] = key, layout
    plain = [key for key, entry in features.items() if key not in keys and entry["dtype"] not in _STRUCTURED]
    videos = tuple(key for key, entry in features.items() if entry["dtype"] == "video")
    return Features(cameras, camera_keys, layouts, {key: features[key] for key in plain}, videos)


def _is_camera(entry: Mapping[str, Any]) -> bool:
    shape = entry.get("shape") or ()
    facts = {**(entry.get("info") or {}), **(entry.get("video_info") or {})}
    if facts.get("is_depth_map") or facts.get("video.is_depth_map"):
        return False
    if entry["dtype"] in _PICTURES:
        return True
    pixels = entry["dtype"] == "uint8" and len(shape) == 3
    return pixels and (shape[0] in _CHANNELS or shape[-1] in _CHANNELS)


def _short(key: str) -> str:
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _layout(key: str, entry: Mapping[str, Any], asked: str | None) -> str:
    """``hwc`` or ``chw``: from the axes' names, else from which axis can be the channels; UserError
    when both can."""
    shape, names = entry.get("shape") or (), entry.get("names")
    if len(shape) != 3:
        raise UserError(f"Camera '{key}' has shape {list(shape)} in info.json; expected height, width and channels.")
    if isinstance(names, list) and len(names) == 3 and all(isinstance(name, str) for name in names):
        first, last = names[0].lower(), names[2].lower()
        if last.startswith("channel") or last in ("c", "rgb"):
            return "hwc"
        if first.startswith("channel") or first in ("c", "rgb"):
            return "chw"
    fits = [layout for layout, axis in (("hwc", 2), ("chw", 0)) if shape[axis] in _CHANNELS]
    if len(fits) == 1:
        return fits[0]
    if asked in ("hwc", "chw"):
        return asked
    raise UserError(
        f"Camera '{key}' has shape {list(shape)} in info.json, which does not tell which axis is the "
        "channels: give data.image_layout=hwc or data.image_layout=chw."
    )


def dimension_names(entry: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names of a vector's dimensions: a list, or a mapping that holds one; empty when none
    fits."""
    if entry is None:
        return ()
    names = entry.get("names")
    if isinstance(names, Mapping):
        lists = [value for value in names.values() if isinstance(value, list)]
        names = lists[0] if len(lists) == 1 else None
    size = int(entry["shape"][0]) if entry.get("shape") else 1
    return tuple(map(str, names)) if isinstance(names, list) and len(names) == size else ()
