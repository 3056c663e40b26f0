"""``meta/modality.json``: what GR00T's users call the parts of a dataset's state and action, and its cameras.

    {"state": {"arm": {"start": 0, "end": 6}, "gripper": {"start": 6, "end": 7}}, "action": {...},
     "video": {"front": {"original_key": "observation.images.cam_high"}}}

The model sees the parts one behind the other, in the order of the file (or of an official checkpoint); without the file
the features of the dataset are taken as they are. Robot units stay in the dataset's order.

Facts: NVIDIA/Isaac-GR00T ``getting_started/data_preparation.md``, ``gr00t/data``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import ACTION, IMAGES, STATE, DataConfig

COLUMNS = {"state": STATE, "action": ACTION}


class Described(Protocol):
    """What is read of a dataset's description (`data.dataset.DatasetInfo`)."""

    path: Path
    cameras: Mapping[str, Any]
    state_dim: int
    action_dim: int


@dataclass(frozen=True)
class Modality:
    """`groups[kind]` (``state``, ``action``): name → dimensions in the dataset's order, in the file's order; `cameras`
    are the dataset's names. All empty without a file."""

    path: Path
    groups: Mapping[str, Mapping[str, tuple[int, ...]]]
    cameras: tuple[str, ...]

    @classmethod
    def of(cls, info: Described, data: DataConfig) -> Modality:
        """Reads the file of `info`'s dataset. UserError for a part outside of its column, or in another column.

        Where `data` joins several columns it has decided what comes where: the file's parts are left aside.
        """
        path = info.path / "meta" / "modality.json"
        raw = read_json(path)
        groups = {}
        for kind, column, dim in (
            ("state", data.state_key, info.state_dim),
            ("action", data.action_key, info.action_dim),
        ):
            parts = {} if "," in column else raw.get(kind, {})
            groups[kind] = {name: _dimensions(path, kind, name, part, column, dim) for name, part in parts.items()}
        keys = [str(part.get("original_key", f"{IMAGES}{name}")) for name, part in raw.get("video", {}).items()]
        names = [key.removeprefix(IMAGES) for key in keys]
        return cls(path, groups, tuple(name for name in names if name in info.cameras))

    def order(self, kind: str, dim: int, names: Sequence[str] = ()) -> tuple[int, ...] | None:
        """The dataset's dimensions in the model's order; None: as they are.

        Args:
            kind: ``state`` or ``action``; an action must have all of its `dim` dimensions in some part, once.
            names: the parts that are wanted, in order; empty: all of the file's.
        """
        groups = self.groups[kind]
        if not groups:
            return None
        order = tuple(d for part in self.named(kind, names).values() for d in part)
        if kind == "action" and sorted(order) != list(range(dim)):
            left = sorted(set(range(dim)) - set(order)) or sorted({d for d in order if order.count(d) > 1})
            raise UserError(
                f"The action parts {', '.join(names or groups)} of '{self.path}' have dimensions {left} not exactly "
                f"once: choose columns with data.action_key, or set data.use_modality=false to take it as it is."
            )
        return None if order == tuple(range(dim)) else order

    def named(self, kind: str, names: Sequence[str] = ()) -> Mapping[str, tuple[int, ...]]:
        """The parts `names`, in their order; empty: all of the file's. UserError for one that is not there."""
        groups = self.groups[kind]
        for name in names:
            if name not in groups:
                raise unknown(f"{kind} part of '{self.path}'", name, groups)
        return {name: groups[name] for name in names or groups}


def _dimensions(path: Path, kind: str, name: str, part: Mapping[str, Any], column: str, dim: int) -> tuple[int, ...]:
    start, end = part.get("start"), part.get("end")
    found = part.get("original_key", COLUMNS[kind])
    if found not in (column, COLUMNS[kind]):
        raise UserError(
            f"{kind} part '{name}' of '{path}' is in column '{found}', and data.{kind}_key is '{column}': name all "
            f"columns there, separated by commas, or set data.use_modality=false."
        )
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= dim):
        raise UserError(
            f"{kind} part '{name}' of '{path}' goes from {start} to {end}; the column has {dim} dimensions."
        )
    return tuple(range(start, end))


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty when there is no such file. UserError when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"'{path}' is not valid JSON: {error}.") from None
