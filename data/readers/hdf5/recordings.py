"""One episode of an HDF5 dataset, as a convention's adapter describes it, and the options that adapters take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vlaforge.data.errors import UserError, nearest


@dataclass(frozen=True)
class Options:
    """What the user may say about an HDF5 dataset; None leaves it to the convention."""

    action_key: str | None = None
    state_key: str | None = None
    language_key: str | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Recording:
    """One episode. Paths inside `file` are below `group`; `cameras` maps a name to the path of its frames.

    `action` and `state` are float32 [length, A] and [length, S] (None where there is no state); `frames` are how many
    each camera has.
    """

    file: Path
    group: str
    length: int
    task: str
    cameras: Mapping[str, str]
    action: np.ndarray
    state: np.ndarray | None
    frames: Mapping[str, int]


@dataclass(frozen=True)
class Collection:
    """All recordings of a dataset in order, and what they have in common."""

    layout: str
    recordings: list[Recording]
    fps: float
    action_names: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    robot_type: str | None = None
    splits: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()
    extra: Any = None


def joined(group: h5py.Group, key: str, what: str, option: str) -> np.ndarray:
    """float32 [length, D] of the datasets `key` names (several, separated by commas, side by side).

    Raises UserError naming the file when one is missing, holds no numbers, or has another length than the first.
    """
    parts = []
    for name in (part.strip() for part in key.split(",")):
        if not isinstance(group.get(name), h5py.Dataset):
            known = numeric_names(group)
            close = nearest(name, known) or known[:8]
            raise UserError(
                f"{group.file.filename}:{group.name} has no dataset '{name}' for the {what}; it has "
                f"{', '.join(close) or 'no numbers'}: name the right one with {option}."
            )
        values = group[name][()]
        if values.dtype.kind not in "fiub" or values.ndim == 0:
            raise UserError(f"{group.file.filename}:{group.name}/{name} holds no rows of numbers.")
        width = int(np.prod(values.shape[1:]))
        parts.append(values.reshape(len(values), width).astype(np.float32))
    lengths = {len(part) for part in parts}
    if len(lengths) > 1:
        raise UserError(f"{group.file.filename}:{group.name}: {key} have unequal lengths {sorted(lengths)}.")
    return np.concatenate(parts, axis=1)


def numeric_names(group: h5py.Group) -> list[str]:
    """Names, relative to `group`, of the datasets in it that hold a vector or number a row."""
    names: list[str] = []

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub" and 1 <= item.ndim <= 2:
            names.append(name)

    group.visititems(visit)
    return names
