"""Optimisers by name: each is an algorithm and the executor that runs it; see `base` for how they work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlaforge.data.errors import unknown
from vlaforge.runtime.optim.base import Executor, Group, Hyper, Leaf, Optimizer
from vlaforge.runtime.optim.external import APEX, TRANSFORMER_ENGINE, ExternalAdam
from vlaforge.runtime.optim.forge import ForgeAdam
from vlaforge.runtime.optim.fused import TorchFusedAdam
from vlaforge.runtime.optim.plain import PlainAdam, PlainSGD

__all__ = ["NAMES", "Group", "Hyper", "Leaf", "Optimizer", "build_optimizer", "executor", "fading"]

ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Choice:
    """What a name of `--optimizer` means."""

    keys: tuple[str, ...]
    executor: Callable[[], Executor]


NAMES: dict[str, Choice] = {
    "AdamW": Choice(ADAM, lambda: PlainAdam(decoupled=True)),
    "TorchFusedAdamW": Choice(ADAM, lambda: TorchFusedAdam(decoupled=True)),
    "TEFusedAdamW": Choice(ADAM, lambda: ExternalAdam(TRANSFORMER_ENGINE, "TEFusedAdamW")),
    "ApexFusedAdamW": Choice(ADAM, lambda: ExternalAdam(APEX, "ApexFusedAdamW")),
    "ForgeAdamW": Choice(ADAM, ForgeAdam),
    "Adam": Choice(ADAM, lambda: PlainAdam(decoupled=False)),
    "SGD": Choice((), PlainSGD),
}


def executor(name: str) -> Executor:
    """The executor behind a name of `--optimizer`, to swap into an optimiser with the same state."""
    if name not in NAMES:
        raise unknown("optimiser", name, NAMES)
    return NAMES[name].executor()


def fading(name: str, groups: Sequence[Group], highest: float = 1.0) -> dict[str, float]:
    """By group, the largest share of a weight that one update takes when the weight has never had a gradient: lr · λ
    with decoupled decay, at `highest` times the group's rate. With coupled decay a weight is its own gradient: infinite
    unless there is none."""
    decoupled = name.endswith("AdamW")
    return {
        group.name: group.lr * highest * group.weight_decay if decoupled or not group.weight_decay else math.inf
        for group in groups
    }


def build_optimizer(
    name: str, groups: Sequence[Group], hyper: Hyper | None = None, master_weights: bool = True
) -> Optimizer:
    """The optimiser called `name` over `groups`. UserError for an unknown one, or one whose library is
    absent."""
    run = executor(name)
    hyper = hyper or Hyper()
    keys = ("momentum",) if name == "SGD" and hyper.momentum > 0 else NAMES[name].keys
    return Optimizer(groups, keys, run, hyper, master_weights)
