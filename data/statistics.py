"""Statistics of actions and states, taken from the columns after the action transform, and cached by what
made them.

    stats = statistics_of(dataset, StatisticsSpec(transform, horizon=50))
    stats.values["action"]["q99"]        # float64 [A], or [H, A] where each step of a chunk has its own
    stats.origin                         # one line for the log: where they come from, and why

Quantiles are true ones of the pooled data. Merging adds counts and moments; quantiles are never averaged:
LeRobot's own aggregate does that, and for a gripper that is ±1 it stores q01 = q99.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vlaforge.data.actions import ActionTransform
from vlaforge.data.dataset import Dataset, Episode
from vlaforge.data.errors import UserError
from vlaforge.data.normalize import Statistics
from vlaforge.data.schema import ACTION, STATE
from vlaforge.data.sketch import Accumulator

NAMES = ("mean", "std", "min", "max", "q01", "q99", "count")
VERSION = 1


@dataclass(frozen=True)
class StatisticsSpec:
    """What statistics are of.

    Args:
        transform: actions are transformed by it first.
        horizon: steps of a chunk; matters only when the mode is not absolute.
        per_step: each step of the chunk has its own statistics [H, A] (default for relative actions).
    """

    transform: ActionTransform = field(default_factory=ActionTransform)
    horizon: int = 1
    per_step: bool | None = None

    @property
    def steps(self) -> int | None:
        """H where statistics are per step, else None."""
        per_step = self.transform.mode == "relative" if self.per_step is None else self.per_step
        return self.horizon if per_step and not self.transform.identity else None

    def key(self, dataset: Dataset) -> str:
        """Of the cache: changes with the data, the episodes, the action mode, the horizon and this code's
        version.
        """
        parts = {
            "version": VERSION,
            "dataset": dataset.fingerprint(),
            "episodes": [episode.index for episode in dataset.episodes],
            "transform": self.transform.to_dict(),
            "horizon": 1 if self.transform.identity else self.horizon,
            "steps": self.steps,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Computed:
    """Statistics by key (``action``, ``observation.state``), and one line on where they come from."""

    values: Statistics
    origin: str


def compute(dataset: Dataset, spec: StatisticsSpec) -> dict[str, dict[str, np.ndarray]]:
    """One pass over the columns of the selected episodes; no video is decoded.

    Returns entries ``action`` and ``observation.state`` (under these names whatever the columns are called),
    those that the dataset has. UserError when a column holds NaN or infinity, naming the episode.
    """
    found: dict[str, Accumulator] = {}

    def add(key: str, rows: np.ndarray, valid: np.ndarray | None = None) -> None:
        if key not in found:
            found[key] = Accumulator(rows.shape[1:])
        found[key].add(rows, valid)

    for episodes in _groups(dataset.episodes):
        states, chunks = [], []
        for episode in episodes:
            state = _column(dataset, STATE, episode, dataset.info.state_dim)
            action = _column(dataset, ACTION, episode, dataset.info.action_dim)
            if state is not None:
                states.append(state)
            if action is not None:
                chunks.append(_transformed(action, state, spec))
        if states:
            add(STATE, np.concatenate(states))
        if chunks:
            valid = [chunk[1] for chunk in chunks if chunk[1] is not None]
            add(ACTION, np.concatenate([c[0] for c in chunks]), np.concatenate(valid) if valid else None)
    return {key: accumulator.result() for key, accumulator in found.items()}


def _groups(episodes: Sequence[Episode], rows: int = 4096) -> Iterable[list[Episode]]:
    """Episodes in runs of some thousand rows, so that sketches are updated in large steps."""
    group: list[Episode] = []
    for episode in episodes:
        group.append(episode)
        if sum(e.length for e in group) >= rows:
            yield group
            group = []
    if group:
        yield group


def _column(dataset: Dataset, key: str, episode: Episode, dim: int) -> np.ndarray | None:
    """float64 [length, dim], or None when the dataset has no such column."""
    if not dim:
        return None
    values = np.asarray(dataset.column(key, episode), np.float64).reshape(episode.length, -1)
    if not np.isfinite(values).all():
        frame, at = np.argwhere(~np.isfinite(values))[0]
        raise UserError(
            f"'{key}' of episode {episode.index} holds {values[frame, at]} at frame {frame}, dimension {at} "
            f"(dataset '{dataset.info.path}'): statistics of it mean nothing. Repair it, or leave the episode out."
        )
    return values


def sample_rows(dataset: Dataset, spec: StatisticsSpec, limit: int = 200_000) -> dict[str, np.ndarray]:
    """Transformed rows of evenly spread episodes, about `limit` of each key at most: for the start-up table.

    [N, D], or [N, H, D] where statistics are per step (only chunks that end within their episode).
    """
    total = sum(episode.length for episode in dataset.episodes)
    stride = max(1, total * (spec.steps or 1) // limit)
    states, chunks = [], []
    for episode in dataset.episodes[::stride]:
        state = _column(dataset, STATE, episode, dataset.info.state_dim)
        action = _column(dataset, ACTION, episode, dataset.info.action_dim)
        if state is not None:
            states.append(state)
        if action is not None:
            rows, valid = _transformed(action, state, spec)
            chunks.append(rows if valid is None else rows[valid.all(1)])
    found = {STATE: states, ACTION: chunks}
    return {key: np.concatenate(parts) for key, parts in found.items() if parts}


def _transformed(
    action: np.ndarray, state: np.ndarray | None, spec: StatisticsSpec
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows for the accumulator, and which steps exist: [T, A], or chunks [T, H, A] with bool [T, H]."""
    if spec.transform.identity:
        return action, None
    length = len(action)
    index = np.arange(length)[:, None] + np.arange(spec.horizon)
    valid = index < length
    chunks = spec.transform.apply(action[np.minimum(index, length - 1)], state)
    return (chunks, valid) if spec.steps else (chunks[valid], None)


# ---------------------------------------------------------------------------------------------------- cache


def cache_folder() -> Path:
    """``$VLAFORGE_CACHE``, else ``$XDG_CACHE_HOME/vlaforge``, else ``~/.cache/vlaforge``."""
    if own := os.environ.get("VLAFORGE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlaforge"


def cached(dataset: Dataset, spec: StatisticsSpec, folder: Path | None = None) -> Computed:
    """`compute`, or what an earlier run computed of the same. Nothing is ever written into the dataset.

    The file appears whole or not at all (written aside, then renamed), so two processes may compute at once.
    A cache that cannot be read or written is computed around.
    """
    path = (folder or cache_folder() / "statistics") / f"{spec.key(dataset)}.json"
    if (values := _load(path)) is not None:
        return Computed(values, "computed from the data by an earlier run")
    values = compute(dataset, spec)
    stored = _store(path, values)
    return Computed(
        values, "computed from the data" + ("" if stored else f" (and not cached: {path} cannot be written)")
    )


def to_json(values: Statistics) -> str:
    """Exact float64 text; `from_json` reads it."""
    return json.dumps({k: {n: np.asarray(v).tolist() for n, v in s.items()} for k, s in values.items()}, indent=1)


def from_json(text: str) -> dict[str, dict[str, np.ndarray]]:
    return {k: {n: np.asarray(v, np.float64) for n, v in s.items()} for k, s in json.loads(text).items()}


def _load(path: Path) -> dict[str, dict[str, np.ndarray]] | None:
    try:
        values = from_json(path.read_text())
        return values if all(set(NAMES) <= set(stats) for stats in values.values()) else None
    except (OSError, ValueError, AttributeError):
        return None


def _store(path: Path, values: Statistics) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(to_json(values))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return True
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- choice


def statistics_of(
    dataset: Dataset,
    spec: StatisticsSpec,
    needed: Mapping[str, Sequence[str]] | None = None,
    compute_with: Callable[[Dataset, StatisticsSpec], Computed] = cached,
) -> Computed:
    """The statistics that a run normalises with.

    The dataset's own are used when they hold all `needed` names (key → names; default all of `NAMES`), the
    actions are absolute, and they agree with the data within 1 % of each dimension's range, so that they
    also cover exactly the selected episodes. Otherwise they are computed; `origin` says which, and why.
    """
    own = dataset.stored_statistics()
    computed = compute_with(dataset, spec)
    reason = _rejected(own, computed.values, spec, needed)
    if reason is None:
        merged = {key: {**computed.values[key], **_float64(own[key])} for key in computed.values}
        return Computed(merged, "stored in the dataset, and agree with its data")
    return Computed(computed.values, f"{computed.origin}, because {reason}")


def _float64(stats: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(stats[name], np.float64).reshape(-1) for name in NAMES[:-1] if name in stats}


def _rejected(own: Statistics | None, true: Statistics, spec: StatisticsSpec, needed) -> str | None:
    """Why the dataset's own statistics cannot serve, or None."""
    if not own:
        return "the dataset carries none"
    if not spec.transform.identity:
        return f"those of the dataset are of absolute actions, not '{spec.transform.mode}'"
    for key, stats in true.items():
        names = (needed or {}).get(key, NAMES[:-1])
        stored = own.get(key, {})
        if missing := [name for name in names if name not in stored]:
            return f"those of the dataset lack {', '.join(missing)} of '{key}'"
        span = stats["max"] - stats["min"]
        for name in names:
            value = np.asarray(stored[name], np.float64).reshape(-1)
            if value.shape != stats[name].shape:
                return f"those of the dataset have {value.size} values of '{key}' {name}, not {stats[name].size}"
            off = np.abs(value - stats[name]) > 0.01 * span + 1e-6 * np.abs(stats[name])
            if off.any():
                d = int(off.argmax())
                return (
                    f"those of the dataset disagree with its data: {name} of '{key}' dimension {d} is "
                    f"{value[d]:.6g} there and {stats[name][d]:.6g} in the selected episodes"
                )
    return None
