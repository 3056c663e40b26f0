"""Recorded results of an official implementation, and what a family says to be compared with them.

A golden folder holds `config.json`, `weights.safetensors` (official names), `batch.safetensors` (what the
official forward received, noise and times included), `expected.safetensors` and, where there are gradients,
`grad_norms.json`. It is the same for every model; a family's `golden.py` defines `Golden(Base)`, which maps
the names in it to ours. `forge-parity` judges.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import Batch, Draw
from vlaforge.models import HERE, Family, available, family
from vlaforge.models.convert import Account, Layout, load_official, read_safetensors

Kind = Literal["exact", "loss", "activation", "output", "gradient", "norm", "trajectory", "sample", "bfloat16"]


@dataclass(frozen=True)
class Folder:
    """What a golden folder holds; `grad_norms` is empty where it records none."""

    path: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    batch: dict[str, Tensor]
    expected: dict[str, Tensor]
    grad_norms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> Folder:
        """UserError names what is missing."""
        path = Path(path)
        needed = ("config.json", "weights.safetensors", "batch.safetensors", "expected.safetensors")
        missing = [name for name in needed if not (path / name).is_file()]
        if missing:
            raise UserError(f"'{path}' is not a golden folder: it lacks {', '.join(missing)}.")
        norms = path / "grad_norms.json"
        return cls(
            path,
            json.loads((path / "config.json").read_text()),
            *(read_safetensors(path / name) for name in needed[1:]),
            json.loads(norms.read_text()) if norms.is_file() else {},
        )


@dataclass(frozen=True)
class Quantity:
    """Our value of one recorded tensor.

    Args:
        name: of the tensor in `expected.safetensors`.
        ours: of the same shape; None where it is not compared, with the reason in `note`.
        kind: which tolerance holds.
        where: bool, broadcastable: elements that are compared (others have no meaning officially); None: all.
        inside: it lies inside of the model, so it is taken from the model before lowering.
    """

    name: str
    ours: Tensor | None
    kind: Kind = "activation"
    note: str = ""
    where: Tensor | None = None
    inside: bool = False


class Base(ABC):
    """One golden folder seen by one family.

    `cut` is what the plan's trims do to a batch; it is applied to what the lowered model is given. `lower` does to
    another model of the folder (another class with the same weights) what was done to the lowered one.
    """

    layouts: ClassVar[Mapping[str, Layout]]
    adamw: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    clip: ClassVar[float] = 1.0

    def __init__(self, folder: Folder):
        self.folder = folder
        self.cut: Callable[[Batch], Batch] = lambda batch: batch
        self.lower: Callable[[nn.Module], Any] = lambda model: None

    @abstractmethod
    def model(self) -> nn.Module:
        """The model of `config.json`, with fresh weights."""

    @abstractmethod
    def inputs(self) -> tuple[Batch, Draw]:
        """The recorded training batch in our fields, and its noise and times."""

    @abstractmethod
    def quantities(self, plain: nn.Module, lowered: nn.Module) -> Iterator[Quantity]:
        """Our value of every recorded tensor but gradients and optimiser steps, which `forge-parity` takes
        itself.

        `lowered` is the model as it would train; `plain` the same weights without any pass, for values inside of it.
        """

    def load(self, model: nn.Module) -> Account:
        """The folder's weights into `model`, strictly, through the official layout."""
        return load_official(model, self.layouts, self.folder.weights)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups of the recorded AdamW steps: all that is trained, unless the recipe has several rates."""
        return [{"params": [parameter for parameter in model.parameters() if parameter.requires_grad]}]

    def loss(self, model: nn.Module) -> Tensor:
        """The scalar that gradients and optimiser steps are taken of."""
        batch, draw = self.inputs()
        return model(self.cut(batch), draw).total()


@dataclass(frozen=True)
class Part:
    """A part of models that has recorded results of its own, such as a frozen encoder; stands in for a family."""

    name: str
    package: str

    def part(self, name: str) -> ModuleType:
        """The module that holds its `Golden`, whatever part is asked for."""
        return import_module(self.package)


def subject(name: str) -> Family | Part:
    """Whose results `name` means: a part with ``models/*/golden_<name>.py``, or a family. UserError for neither."""
    wanted = name.lower().replace("-", "_")
    parts = {path.stem.removeprefix("golden_"): path.parent.name for path in HERE.glob("*/golden_*.py")}
    if wanted in parts:
        return Part(wanted, f"vlaforge.models.{parts[wanted]}.golden_{wanted}")
    if wanted in available():
        return family(wanted)
    raise unknown("model", name, [*available(), *parts])


class Recorder:
    """Outputs of submodules, while active: ``with Recorder(model) as seen: ...; seen["vision.norm"][0]``.

    A name may carry ``:in``, for the positional inputs instead. Each value is a list with one entry a call, detached.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]):
        self.model, self.names = model, names
        self.seen: dict[str, list[Any]] = defaultdict(list)

    def __enter__(self) -> dict[str, list[Any]]:
        self.handles = []
        for name in self.names:
            path, _, side = name.partition(":")
            keep = self.seen[name]

            def hook(module: nn.Module, inputs: Any, output: Any, keep: list = keep, side: str = side) -> None:
                keep.append(_detached(inputs if side == "in" else output))

            self.handles.append(self.model.get_submodule(path).register_forward_hook(hook))
        return self.seen

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(_detached(part) for part in value) if isinstance(value, tuple | list) else value


def to_bfloat16(model: nn.Module) -> nn.Module:
    """In place: bf16 weights but for what the model keeps in fp32; for the official runs in that
    precision.
    """
    from fnmatch import fnmatchcase

    kept = model.keep_fp32()
    for path, module in model.named_modules():
        parents = [path[: len(path) - n] for n in range(len(path) + 1) if n == 0 or path[-n] == "."]
        if not any(fnmatchcase(parent, pattern) for parent in parents for pattern in kept):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)
    return model
