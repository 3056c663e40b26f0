"""Adapters as files, as `peft` reads and writes them: ``adapter_model.safetensors`` and ``adapter_config.json``.

A LoRA checkpoint holds the adapter and a fingerprint of its base, not the base: `attach` puts it on the base that the
flags name, and refuses another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.graphs.packing import split
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.checkpoint.tensors import TensorFiles
from vlaforge.runtime.lora import INITS, LoraConfig, adapted, fingerprint, inject
from vlaforge.runtime.params import canonical, split_names

PREFIX = "base_model.model."
STEM, CONFIG, META = "adapter_model", "adapter_config.json", "adapter_meta.json"


@dataclass(frozen=True)
class Attached:
    """What `attach` did; kept as the model's attribute `lora`."""

    config: LoraConfig
    paths: tuple[str, ...]
    base: str | None
    mark: str

    def to_json(self) -> str:
        """``adapter_config.json`` as peft reads it."""
        config = self.config
        content = {
            "peft_type": "LORA",
            "task_type": None,
            "inference_mode": True,
            "base_model_name_or_path": self.base,
            "r": config.r,
            "lora_alpha": config.alpha,
            "lora_dropout": config.dropout,
            "use_rslora": config.rslora,
            "target_modules": list(self.paths),
            "modules_to_save": list(config.save) or None,
            "bias": config.bias,
            "init_lora_weights": {"true": True, "false": False}.get(config.init, config.init),
            "fan_in_fan_out": False,
            "use_dora": False,
        }
        return json.dumps(content, indent=1) + "\n"

    def meta(self) -> str:
        """``adapter_meta.json``: which base this is an adapter of."""
        content = {"format": 1, "base_checkpoint": self.base, "base_fingerprint": self.mark}
        return json.dumps(content, indent=1) + "\n"


def lora_config(args: TrainingArgs) -> LoraConfig:
    """The configuration that the flags describe."""
    return LoraConfig(
        r=args.lora_r,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        targets=tuple(split_names(args.lora_target_modules)),
        save=tuple(split_names(args.lora_modules_to_save)),
        bias=args.lora_bias,
        init=args.lora_init,
    )


def _source(args: TrainingArgs) -> Path | None:
    return Path(args.lora_adapter).expanduser() if args.lora_adapter else None


def chosen_config(args: TrainingArgs, found: Path | None = None) -> LoraConfig:
    """The configuration of the adapter that the run resumes (`found`) or starts from, else that of the flags."""
    source = found or _source(args)
    if source is None:
        return lora_config(args)
    return replace(read_config(source), dropout=args.lora_dropout)


def is_adapter(folder: Path | None) -> bool:
    """Whether a checkpoint's folder holds an adapter rather than a model."""
    return folder is not None and (folder / CONFIG).is_file()


def adapt(model: nn.Module, args: TrainingArgs, found: Path | None) -> tuple[LoraConfig, list[str]]:
    """Puts adapters into `model` (also one on the meta device) and loads those that the run takes up; returns their
    configuration and the adapted paths. UserError when there is nothing to adapt, or an adapter does not fit."""
    source, config = found or _source(args), chosen_config(args, found)
    paths = inject(model, config)
    if source is not None:
        load_adapter(model, TensorFiles(source, STEM))
    else:
        _check_rank(model, paths, config.r)
    return config, paths


def _check_rank(model: nn.Module, paths: list[str], r: int) -> None:
    """UserError where no adapted weight has as many rows and columns as the rank: an adapter would hold more than it
    adapts."""
    most = max(min(weight.shape[0], weight[0].numel()) for weight in (model.get_submodule(p).weight for p in paths))
    if r > most:
        raise UserError(f"--lora-r is {r}, but no adapted weight has a rank above {most}: choose less, often 16.")


def attach(model: nn.Module, args: TrainingArgs, found: Path | None, note: Callable[[str], None]) -> None:
    """Adapts `model`, which has its base weights, as the flags say: fresh, from ``--lora-adapter``, or from the
    checkpoint `found` that the run resumes. Sets `model.lora`.

    Raises:
        UserError: nothing to adapt, an adapter that does not fit, or one that was trained on another base.
    """
    source = found or _source(args)
    meta = _read(source / META) if source is not None and (source / META).is_file() else {}
    config, paths = adapt(model, args, found)
    mark = fingerprint(model)
    known = meta.get("base_fingerprint")
    if known is not None and known != mark:
        raise UserError(
            f"The adapter in '{source}' was trained on another base (fingerprint {known}, this one is {mark}): give "
            f"the same --pretrained-checkpoint, it was {meta.get('base_checkpoint')}."
        )
    model.lora = Attached(config, tuple(paths), args.pretrained_checkpoint, mark)
    trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    note(
        f"LoRA: rank {config.r}, alpha {config.alpha:g} on {len(paths)} modules; {trains:,} of {total:,} parameters "
        f"train ({trains / total:.2%})" + (f"; from {source}" if source is not None else "")
    )


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What an adapter file holds: adapters and everything else that trains, under peft's names."""
    inside = adapted(model)
    kept = split(model, {canonical(name): p.detach() for name, p in _kept(model)}, "weights")
    named = ((_peft_name(name, inside), value) for name, value in kept.items())
    return {PREFIX + name: _as_stored(name, value) for name, value in named}


def _kept(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name)


def _peft_name(name: str, inside: Mapping[str, nn.Module]) -> str:
    """peft moves an adapted module's own parameters one level down, and an embedding's adapter has other names."""
    owner, _, leaf = name.rpartition(".")
    if owner in inside:
        return f"{owner}.base_layer.{leaf}"
    holder, _, side = owner.rpartition(".")
    if side in ("lora_A", "lora_B") and isinstance(inside.get(holder), nn.Embedding):
        return f"{holder}.{side.replace('lora_', 'lora_embedding_')}"
    return name


def _read(path: Path) -> dict[str, Any]:
    """A JSON object of an adapter's folder."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' does not hold the settings of an adapter: it is damaged.")
    return content


def read_config(folder: Path) -> LoraConfig:
    """The configuration of an adapter's folder, ours or peft's. UserError for what we cannot do."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"'{folder}' is no LoRA adapter: it has no {CONFIG}.")
    raw = _read(path)
    odd = [name for name in ("use_dora", "rank_pattern", "alpha_pattern", "layers_to_transform") if raw.get(name)]
    if raw.get("peft_type") != "LORA" or odd:
        raise UserError(
            f"The adapter in '{folder}' uses {', '.join(odd) or raw.get('peft_type')}, which is not plain LoRA."
        )
    targets = raw.get("target_modules") or ()
    if isinstance(targets, str):
        raise UserError(f"The adapter in '{folder}' names its modules by a regular expression: list them instead.")
    init = raw.get("init_lora_weights", True)
    if any(not isinstance(raw.get(name), int | float) or raw[name] <= 0 for name in ("r", "lora_alpha")):
        raise UserError(f"'{path}' lacks a rank r and a lora_alpha above 0: it is damaged.")
    return LoraConfig(
        r=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        dropout=float(raw.get("lora_dropout") or 0.0),
        targets=tuple(targets),
        save=tuple(raw.get("modules_to_save") or ()),
        bias=raw.get("bias", "none"),
        init=str(init).lower() if str(init).lower() in INITS else "true",
        rslora=bool(raw.get("use_rslora")),
    )


@torch.no_grad()
def load_adapter(model: nn.Module, stored: Mapping[str, Tensor]) -> int:
    """Loads an adapter file's tensors (peft's names) into an adapted model, strictly; returns how many.

    Raises:
        UserError: missing or unexpected names or other shapes, listed.
    """
    inside = adapted(model)
    wanted = {_peft_name(canonical(name), inside): p for name, p in _kept(model)}
    given = {name.removeprefix(PREFIX): value for name, value in stored.items()}
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    wrong = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(_as_stored(name, p).shape)}"
        for name, p in wanted.items()
        if name in given and given[name].shape != _as_stored(name, p).shape
    ]
    faults = [
        f"{len(names)} {word} ({', '.join(names[:4])})"
        for word, names in (("missing", missing), ("unexpected", extra), ("of another shape", wrong))
        if names
    ]
    if faults:
        raise UserError(f"The adapter does not fit the model and its --lora settings: {'; '.join(faults)}.")
    for name, parameter in wanted.items():
        _as_stored(name, parameter.data).copy_(given[name])
    return len(wanted)


def _as_stored(name: str, value: Tensor) -> Tensor:
    """peft keeps an embedding's A transposed."""
    return value.T if name.endswith("lora_embedding_A") else value
