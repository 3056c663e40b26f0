"""What a resumed run does differently from the run that wrote its checkpoint: said before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlaforge.data.errors import UserError
from vlaforge.runtime.checkpoint import files
from vlaforge.runtime.config import load_yaml
from vlaforge.runtime.setup import Setup

CONFIG = "config.yaml"
QUIET = ("train.output_dir", "train.num_workers", "train.log_interval", "train.device")
"""What changes nothing that is trained."""
UNSET = "not set"


def check_resumed(setup: Setup, found: Path) -> list[str]:
    """Compares `setup` with the checkpoint at `found`; returns sentences for the log.

    Raises:
        UserError: actions would mean something else (other normalisation), or the optimiser is of another kind.
    """
    now = _flat(setup.resolved.tree())
    before = _flat(load_yaml(found / CONFIG, "the checkpoint")) if (found / CONFIG).is_file() else now
    changed = changes(before, now)
    shown = ", ".join(f"{name} was {old}, now {new}" for name, (old, new) in changed.items())
    if files.manifest(found).get("normalizers") != setup.normalizers.hash:
        raise UserError(
            f"Checkpoint '{found}' cannot be resumed with another normalisation than it was trained with"
            f"{f' ({shown})' if shown else ': the statistics differ'}. Give the same data and settings, or start a new "
            f"run from its weights with --pretrained-checkpoint."
        )
    old, new = changed.get("train.optimizer", ("", ""))
    if (old == "SGD") != (new == "SGD"):
        raise UserError(
            f"Checkpoint '{found}' holds the state of {old}, which {new} cannot take up: give --optimizer {old}, or "
            "start a new run from its weights with --pretrained-checkpoint."
        )
    return [f"Resumed with other settings than the checkpoint's: {shown}."] if shown else []


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name → (old, new) of the settings that differ, `UNSET` where one side has no such setting (a camera, say)."""
    pairs = {name: (before.get(name, UNSET), now.get(name, UNSET)) for name in [*now, *sorted(set(before) - set(now))]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in QUIET}


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted name; a mapping without entries is a value."""

    def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                yield from leaves(item, f"{path}.{name}" if path else str(name))
        else:
            yield path, value

    return dict(leaves(tree, ""))
