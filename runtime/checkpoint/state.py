"""What a checkpoint holds besides tensors, and how a run takes all of it up again.

model, ema, optim   tensors (`formats`)
state.json          steps, loader cursor, counters, loss scale, generators of each rank
config.yaml         the resolved configuration: ``forge-run --config-file`` takes it
plan.txt, plan.json, normalizers.json, tokenizer.json, and manifest.json with versions
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.graphs.packing import join, split
from vlaforge.graphs.rows import Outside
from vlaforge.runtime.adapter import CONFIG as ADAPTER
from vlaforge.runtime.adapter import META, adapter_tensors
from vlaforge.runtime.assemble import Parts
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.checkpoint.resumed import CONFIG, STATE, read_state
from vlaforge.runtime.checkpoint.store import Content
from vlaforge.runtime.checkpoint.weights import model_tensors
from vlaforge.runtime.process import load_rng_state, rng_state
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.setup import Setup

NORMALIZERS = "normalizers.json"


def capture(setup: Setup, parts: Parts, ranks: Ranks, completed: int, metric: float | None) -> Content:
    """The checkpoint of this moment. Tensors are the live ones: write or copy them before the next step."""
    lora = getattr(parts.model, "lora", None)
    groups = {"model": model_tensors(parts.model)} if lora is None else {"adapter": adapter_tensors(parts.model)}
    if parts.ema is not None:
        groups["ema"] = split(parts.model, parts.ema.tensors(), "weights")
    texts = {
        CONFIG: setup.resolved.to_yaml(),
        NORMALIZERS: setup.normalizers.to_json(),
        "dataset.json": json.dumps(_dataset(setup), indent=1) + "\n",
        "plan.txt": parts.plan.text() + "\n",
        "plan.json": json.dumps(parts.plan.json(), indent=1) + "\n",
    }
    if setup.statistics is not None:
        texts["statistics.json"] = json.dumps(_plain(setup.statistics.values), indent=1) + "\n"
    if lora is not None:
        texts |= {ADAPTER: lora.to_json(), META: lora.meta()}
    if setup.args.save_training_state:
        groups["optim"] = by_key(partial(split, parts.model), parts.optimizer.state_tensors())
        texts[STATE] = json.dumps(_state(setup, parts, ranks, completed)) + "\n"
    copies = {}
    if setup.tokenizer is not None:
        copies["tokenizer.json"] = Path(setup.tokenizer.path)
    return Content(completed, groups, texts, copies, _about(setup, metric))


def _dataset(setup: Setup) -> dict[str, Any]:
    """What the data looked like: for serving, and for exports that name it."""
    info = setup.dataset.info
    used = [name for name in getattr(setup.processing, "cameras", info.cameras) if name is not None]
    return {
        "path": str(info.path),
        "format": f"{info.format} {info.version}",
        "fingerprint": setup.dataset.fingerprint(),
        "fps": info.fps,
        "cameras": {n: {"height": info.cameras[n].height, "width": info.cameras[n].width} for n in used},
        "action_dim": info.action_dim,
        "state_dim": info.state_dim,
        "action_names": list(info.action_names),
        "state_names": list(info.state_names),
        "robot_type": info.robot_type,
    }


def _plain(values: Any) -> Any:
    """Statistics as lists for JSON."""
    if isinstance(values, Mapping):
        return {key: _plain(value) for key, value in values.items()}
    return values.tolist() if hasattr(values, "tolist") else values


def _state(setup: Setup, parts: Parts, ranks: Ranks, completed: int) -> dict[str, Any]:
    return {
        "completed": completed,
        "iteration": int(parts.core.iteration),
        "optimizer": setup.args.optimizer,
        "loader": parts.feed.state_dict(),
        "guard": parts.core.guard.state(),
        "loss_scale": parts.core.loss_scale.state(),
        "world": ranks.world,
        "rng": ranks.gather(rng_state()),
    }


def _about(setup: Setup, metric: float | None) -> dict[str, Any]:
    """Facts for the manifest."""
    facts = {
        "model": setup.resolved.family.name,
        "preset": setup.args.preset,
        "config": setup.resolved.digest(),
        "normalizers": setup.normalizers.hash,
        "dataset": setup.dataset.fingerprint(),
        "versions": versions(),
    }
    return facts if metric is None else {**facts, "best": metric}


def versions() -> dict[str, str]:
    """Of what made a checkpoint."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("vlaforge", "numpy", "safetensors", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def by_key(
    change: Callable[[Mapping[str, Tensor], Outside], dict[str, Tensor]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Applies `change` (of tensors by parameter name, and what they hold where nothing trains) to ``<key>.<parameter>``
    tensors, one key at a time."""
    grouped: dict[str, dict[str, Tensor]] = {}
    for full, value in tensors.items():
        key, _, name = full.partition(".")
        grouped.setdefault(key, {})[name] = value
    changed = {key: change(group, "masters" if key == "master" else "zeros") for key, group in grouped.items()}
    return {f"{key}.{name}": value for key, group in changed.items() for name, value in group.items()}


def _joined(model: nn.Module, tensors: Mapping[str, Tensor], outside: Outside) -> dict[str, Tensor]:
    """Tensors by canonical name as the lowered model has its parameters."""
    try:
        return join(model, dict(tensors), outside)
    except (KeyError, ValueError) as error:
        raise UserError(f"The training state does not fit the plan: {error.args[0]}.") from error


def restore(parts: Parts, ranks: Ranks, path: Path) -> tuple[int, list[str]]:
    """Takes up optimiser, average, counters, loader and generators from the checkpoint at `path`; the
    weights are loaded before. Returns the completed steps and sentences for the log.

    Raises:
        UserError: it has no training state, or one of another model, data or order.
    """
    state = read_state(path)
    notes = []
    parts.optimizer.load_state(by_key(partial(_joined, parts.model), formats.read(path, "optim") or {}))
    if parts.ema is not None:
        average = formats.read(path, "ema")
        if average is None:
            notes.append("The checkpoint has no average of the weights: it starts from the present ones.")
            parts.ema.reset()
        else:
            parts.ema.load(_joined(parts.model, average, "weights"))
    parts.core.iteration.fill_(state["iteration"])
    parts.core.guard.load(state["guard"])
    parts.core.loss_scale.load(state["loss_scale"])
    parts.feed.load_state_dict(state["loader"])
    if ranks.rank < len(state["rng"]):
        load_rng_state(state["rng"][ranks.rank])
    if state["world"] != ranks.world:
        notes.append(
            f"The checkpoint is of {state['world']} ranks, this run has {ranks.world}: the data order goes on."
        )
    return int(state["completed"]), notes
