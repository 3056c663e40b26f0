"""Checks on the numbers of episodes, whatever their format: NaN, constant dimensions, timestamps, duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from vlaforge.data.check.findings import Report, brief

_GRID_S = 1e-4  # a stored time may be this far from frame / fps, or the rounding of a float32 of its size


def check_values(report: Report, key: str, values: np.ndarray, file: object, episode: int) -> None:
    """NaN and infinity in `values` [T, ...]: one finding an episode and column, with the first frame."""
    if values.dtype.kind != "f":
        return
    bad = ~np.isfinite(values.reshape(len(values), -1))
    if bad.any():
        frame, dimension = np.argwhere(bad)[0].tolist()
        what = "NaN" if np.isnan(values.reshape(len(values), -1)[frame, dimension]) else "infinity"
        rows = int(bad.any(axis=1).sum())
        report.add(
            "values", f"'{key}' has {what} in {rows} rows, first frame {frame}, dimension {dimension}", file, episode
        )


def check_timestamps(report: Report, times: np.ndarray, fps: float, file: object, episode: int) -> None:
    """Times [T] that are not frame / fps, to 0.1 ms (or what the stored dtype can tell apart at that size)."""
    times = times.reshape(-1)
    expected = np.arange(len(times)) / fps
    tolerance = _GRID_S
    if times.dtype == np.float32 and len(times):
        tolerance = max(tolerance, 2 * float(np.spacing(np.float32(abs(times).max()))))
    off = np.flatnonzero(~(np.abs(times.astype(np.float64) - expected) <= tolerance))
    if len(off):
        frame = int(off[0])
        report.add(
            "timestamps",
            f"{len(off)} of {len(times)} times are off the grid of {fps:g} frames a second: frame {frame} has "
            f"{float(times[frame]):.4f} s, expected {expected[frame]:.4f} s",
            file,
            episode,
        )


def check_constant(
    report: Report, key: str, columns: Sequence[np.ndarray], names: Sequence[str], file: object, episodes: Sequence[int]
) -> None:
    """Dimensions of `key` that have one value in all episodes (`columns`: [T, D] each)."""
    rows = [column.reshape(len(column), -1) for column in columns if len(column)]
    if not rows or sum(map(len, rows)) < 2:
        return
    low, high = np.min([r.min(0) for r in rows], axis=0), np.max([r.max(0) for r in rows], axis=0)
    for dimension in np.flatnonzero(low == high).tolist():
        name = f" ({names[dimension]})" if len(names) == len(low) else ""
        span = f"episodes {min(episodes)} to {max(episodes)}" if len(episodes) > 1 else f"episode {episodes[0]}"
        message = f"dimension {dimension}{name} of '{key}' is {low[dimension]:g} in every row of {span}"
        report.add("constant", message, file)


def digest(columns: Mapping[str, np.ndarray]) -> bytes:
    """A hash of an episode's numbers."""
    state = hashlib.blake2b(digest_size=16)
    for key, values in sorted(columns.items()):
        state.update(f"{key}{values.shape}".encode())
        state.update(np.ascontiguousarray(values))
    return state.digest()


def check_duplicates(report: Report, digests: Mapping[int, bytes], files: Mapping[int, object]) -> None:
    """Episodes whose actions and states are the same in every row."""
    first: dict[bytes, int] = {}
    for episode, value in digests.items():
        if value in first:
            other = first[value]
            message = f"has the same actions and states as episode {other} ({files[other]})"
            report.add("duplicates", message, files[episode], episode)
        first.setdefault(value, episode)


def check_statistics(
    report: Report,
    key: str,
    stored: Mapping[str, np.ndarray],
    values: np.ndarray,
    file: object,
    episode: int | None = None,
) -> None:
    """Statistics stored for `key` against `values` [T, D], the rows that they are of.

    min, max, mean and std must agree within 0.1 % of the dimension's range. Quantiles must lie between min and max;
    one further than 10 % of the range from the true one is a warning: LeRobot averages them over episodes.
    """
    rows = values.reshape(len(values), -1).astype(np.float64)
    if not len(rows) or not np.isfinite(rows).all():
        return
    truth = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    span = np.maximum(truth["max"] - truth["min"], 1e-3 * np.maximum(np.abs(truth["max"]), 1e-3))
    far: list[str] = []
    for name, value in stored.items():
        value = np.asarray(value, np.float64).reshape(-1)
        quantile = _quantile(name)
        if name == "count" and episode is not None and value.size == 1 and int(value[0]) != len(rows):
            report.add("statistics", f"count of '{key}' is {int(value[0])}, but it has {len(rows)} rows", file, episode)
        if name not in truth and quantile is None:
            continue
        if value.shape != truth["min"].shape:
            message = f"{name} of '{key}' has {value.size} numbers, but the data has {truth['min'].size}"
            report.add("statistics", message, file, episode)
            continue
        true = truth[name] if quantile is None else np.clip(value, truth["min"], truth["max"])
        off = np.flatnonzero(~(np.abs(value - true) <= 0.001 * span))
        if len(off):
            message = f"{name} of '{key}' is {value[off[0]]:.5g} in dimension {off[0]}, but the data"
            message += f" gives {true[off[0]]:.5g}" if quantile is None else f" has nothing beyond {true[off[0]]:.5g}"
            message += f" (and in dimensions {brief(off[1:])})" if len(off) > 1 else ""
            report.add("statistics", message, file, episode)
        elif quantile is not None and (np.abs(value - np.quantile(rows, quantile, axis=0)) > 0.1 * span).any():
            far.append(name)
    if far:
        message = f"{', '.join(far)} of '{key}' are over 10 % of the range from the data's (averaged over episodes?)"
        report.add("statistics", message, file, episode, warning=True)


def _quantile(name: str) -> float | None:
    return int(name[1:]) / 100 if name[:1] == "q" and name[1:].isdigit() else None
