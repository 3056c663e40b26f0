"""Statistics that a dataset carries, brought to one shape a feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlaforge.data.errors import UserError

Statistics = dict[str, dict[str, np.ndarray]]
REPAIR = "restore the file, or remove it to have statistics computed from the data"


def checked(found: Any, where: str) -> Statistics:
    """Statistics as JSON or parquet hold them, as float64 arrays by feature and name; `where` they stand.

    Raises:
        UserError: they are not numbers by feature and name.
    """
    if not isinstance(found, Mapping):
        raise UserError(f"{where} does not hold statistics by feature and name: {REPAIR}.")
    out: Statistics = {}
    for key, entry in found.items():
        if not isinstance(entry, Mapping):
            raise UserError(f"{where}: '{key}' has no statistics by name: {REPAIR}.")
        for name, value in entry.items():
            try:
                out.setdefault(key, {})[name] = np.asarray(value, np.float64)
            except (TypeError, ValueError):
                raise UserError(f"{where}: {name} of '{key}' is not numbers: {REPAIR}.") from None
    return out


def merge_episodes(episodes: Sequence[Statistics]) -> Statistics:
    """Statistics of a dataset from those of its episodes: count, min, max, mean and std, float64.

    Quantiles are left out: those of a whole do not follow from those of its parts.
    """
    merged: Statistics = {}
    keys = set.intersection(*(set(episode) for episode in episodes)) if episodes else set()
    for key in sorted(keys):
        parts = [episode[key] for episode in episodes]
        needed = ("count", "mean", "std", "min", "max")
        if any(name not in part for part in parts for name in needed):
            continue
        if len({part[name].shape for part in parts for name in needed[1:]}) > 1:
            raise UserError(f"The statistics of '{key}' differ in shape from episode to episode: {REPAIR}.")
        weights = np.stack([part["count"].reshape(-1)[:1] for part in parts])
        shape = parts[0]["mean"].shape
        share = (weights / weights.sum()).reshape(-1, *[1] * len(shape))
        means, stds = (np.stack([part[name] for part in parts]) for name in ("mean", "std"))
        mean = (share * means).sum(0)
        variance = (share * (stds**2 + (means - mean) ** 2)).sum(0)
        merged[key] = {
            "min": np.min([part["min"] for part in parts], axis=0),
            "max": np.max([part["max"] for part in parts], axis=0),
            "mean": mean,
            "std": np.sqrt(variance),
            "count": weights.sum(0),
        }
    return merged


def per_channel(entry: Mapping[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """A camera's statistics as [C], whether they were stored as [C], [C, 1, 1], [H, W, C] or [C, H, W].

    Whole-picture statistics are reduced over the pixels, so that they are those of all pixels of a channel
    together. `layout` is the camera's: it tells a picture's channel axis, and so does a shape of [C, 1, 1] or
    [1, 1, C].
    """
    values = {name: np.asarray(value, np.float64) for name, value in entry.items()}
    mean = values.get("mean")
    if mean is None or mean.ndim <= 1:
        return {name: value.reshape(-1) for name, value in values.items()}
    if mean.ndim == 3 and mean.shape[1:] == (1, 1):
        axis = 0
    elif mean.ndim == 3 and mean.shape[:2] == (1, 1):
        axis = 2
    else:
        axis = 2 if layout == "hwc" else 0
    if mean.size == mean.shape[axis]:
        return {name: value.reshape(-1) for name, value in values.items()}
    others = tuple(number for number in range(mean.ndim) if number != axis)
    reduced = {}
    for name, value in values.items():
        if name == "count" or value.shape != mean.shape:
            reduced[name] = value.reshape(-1)
        elif name == "std":
            channel_mean = mean.mean(others, keepdims=True)
            reduced[name] = np.sqrt((value**2 + (mean - channel_mean) ** 2).mean(others))
        elif name in ("min", "max"):
            reduced[name] = getattr(value, name)(others)
        elif name == "mean":
            reduced[name] = value.mean(others)
        # Quantiles of single pixels do not give those of the channel: left out.
    return reduced
