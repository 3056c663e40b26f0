"""What a resumed run does differently from the run that wrote its checkpoint: said or refused before a model is built.

Settings may change at a resume (a longer run, another rate); what may not is what would make the saved state mean
something else: the normalisation, the order of the data, the model's shapes, what trains, the optimiser's algorithm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.runtime.adapter import is_adapter
from vlaforge.runtime.checkpoint import files, formats
from vlaforge.runtime.checkpoint.weights import headers, load_model, own_layout
from vlaforge.runtime.config import load_yaml
from vlaforge.runtime.params import canonical
from vlaforge.runtime.programs import program
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.setup import Setup

CONFIG, STATE = "config.yaml", "state.json"
QUIET = ("train.output_dir", "train.num_workers", "train.log_interval", "train.device")
"""What changes nothing that is trained."""
UNSET = "not set"
ANEW = "or start a new run from its weights with --pretrained-checkpoint"


def check_resumed(setup: Setup, found: Path) -> list[str]:
    """Compares `setup` with the checkpoint at `found`; returns sentences for the log.

    Raises:
        UserError: actions would mean something else (other normalisation), the data would come in another order, the
            optimiser is of another kind, or the checkpoint is not one to resume from.
    """
    changed = _changed(setup, found)
    shown = _shown(changed)
    check_kind(found, setup.args.use_lora)
    if files.manifest(found).get("normalizers") != setup.normalizers.hash:
        raise UserError(
            f"Checkpoint '{found}' cannot be resumed with another normalisation than it was trained with"
            f"{f' ({shown})' if shown else ': the statistics differ'}. Give the same data and settings, {ANEW}."
        )
    old, new = changed.get("train.optimizer", ("AdamW", "AdamW"))
    if _algorithm(old) != _algorithm(new):
        asked = "SGD" not in (old, new) and setup.args.was_set("optimizer")
        if not asked:
            also = "" if "SGD" in (old, new) else f" (or --optimizer {new}, if the change is meant)"
            raise UserError(
                f"Checkpoint '{found}' holds the state of {old}, and {new} would go on from it: give --optimizer {old}"
                f"{also}, {ANEW}."
            )
    feed = program(setup.args.trainer_type).loader(setup, setup.contract, Ranks())
    feed.load_state_dict(read_state(found)["loader"])
    return [f"Resumed with other settings than the checkpoint's: {shown}."] if shown else []


def check_kind(found: Path, use_lora: bool) -> None:
    """UserError when a checkpoint of adapters is resumed without them, or one of whole weights with them."""
    if is_adapter(found) != use_lora:
        kind, do = ("a LoRA adapter", "add") if is_adapter(found) else ("a whole model", "leave out")
        raise UserError(f"Checkpoint '{found}' is {kind}: {do} --use-lora to resume it.")


def check_resumed_weights(setup: Setup, model: nn.Module, found: Path) -> None:
    """The checkpoint's weights fit `model` (on the meta device) by names and shapes."""
    if setup.args.use_lora:  # its base is not in the checkpoint
        return
    try:
        load_model(model, headers(found), own_layout())
    except UserError as error:
        changed = {name: pair for name, pair in _changed(setup, found).items() if name.startswith("model.")}
        if not changed:
            raise
        raise UserError(
            f"Checkpoint '{found}' does not fit the model, which is another one now: {_shown(changed)}. Give the "
            "settings that it was trained with, or start a new run."
        ) from error


def check_resumed_optimizer(setup: Setup, model: nn.Module, found: Path) -> None:
    """All parameters that the checkpoint has optimiser state of train in `model` too."""
    trained = {name.partition(".")[2] for name in formats.read(found, "optim") or {}}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and canonical(name) in trained]
    if frozen:
        shown = _shown(_changed(setup, found))
        raise UserError(
            f"Checkpoint '{found}' was trained with {len(frozen)} parameters that do not train now "
            f"({', '.join(frozen[:3])}{', ...' if len(frozen) > 3 else ''}){f': {shown}' if shown else ''}. Give the "
            f"settings that it was trained with (--freeze-modules and the model's), {ANEW}."
        )


def read_state(folder: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint. UserError when it was saved without."""
    if not (folder / STATE).is_file():
        raise UserError(
            f"Checkpoint '{folder}' has no training state, because it was saved with --no-save-training-state: start "
            "a new run from its weights with --pretrained-checkpoint."
        )
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name → (old, new) of the settings that differ, `UNSET` where one side has no such setting (a camera, say)."""
    pairs = {name: (before.get(name, UNSET), now.get(name, UNSET)) for name in [*now, *sorted(set(before) - set(now))]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in QUIET}


def _changed(setup: Setup, found: Path) -> dict[str, tuple[Any, Any]]:
    now = _flat(setup.resolved.tree())
    return changes(_flat(load_yaml(found / CONFIG, "the checkpoint")), now) if (found / CONFIG).is_file() else {}


def _shown(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {old}, now {new}" for name, (old, new) in changed.items())


def _algorithm(optimizer: str) -> str:
    """What an optimiser computes, whoever's code does it."""
    return optimizer if optimizer in ("SGD", "Adam") else "AdamW"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted name; a mapping without entries is a value."""

    def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                yield from leaves(item, f"{path}.{name}" if path else str(name))
        else:
            yield path, value

    return dict(leaves(tree, ""))
