"""Tiny presets of all families, trained for a few steps under any plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from vlaforge import models
from vlaforge.bench.sides import config_of
from vlaforge.data.collate import trimmed
from vlaforge.data.schema import Contract, Minibatch, make_draw
from vlaforge.graphs import Plan, PlanOptions, StepParts, make_plan, registry
from vlaforge.runtime.guards import Guard, GuardConfig, LossScale
from vlaforge.runtime.optim import Hyper, Optimizer, build_optimizer
from vlaforge.runtime.params import build_groups
from vlaforge.runtime.programs import FinetuneTrainer
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.schedules import Schedule
from vlaforge.runtime.step import Step

CPU = torch.device("cpu")
FAMILIES = [name for name in models.available() if "tiny" in models.family(name).presets()]


@dataclass
class Trained:
    """Losses of each step, the model and optimiser afterwards, and the plan."""

    losses: list[float]
    model: torch.nn.Module
    optimizer: Optimizer
    plan: Plan


class Tiny:
    """One family's tiny preset with random weights (no zero-initialised branch) and batches with padding."""

    def __init__(self, name: str):
        self.name = name
        self.family = models.family(name)
        self.config = config_of(self.family, "tiny")
        self.contract: Contract = self.family.model.contract(self.config)

    def model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        model = self.family.model(self.config)
        for parameter in model.parameters():
            if parameter.detach().abs().max() == 0:
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    def batch(self, seed: int, size: int = 2) -> Minibatch:
        """A synthetic micro-batch: padded where the contract allows it, the last slot of an `any` trim absent."""
        batch = self.contract.synthetic(size, seed)
        generator = torch.Generator().manual_seed(seed)
        for trim in self.contract.trims:
            mask = batch[trim.mask]
            if trim.keep == "any":
                mask[:, 1:] = False
                continue
            length = mask.shape[1]
            valid = torch.randint(length // 4, length * 3 // 4, (size, 1), generator=generator)
            position = torch.arange(length)[None]
            mask &= (position < valid) if trim.keep == "prefix" else (position >= length - valid)
        draw = make_draw(self.contract.draws, range(size), seed=seed, epoch=0)
        return Minibatch(batch, draw, torch.arange(size))

    def plan(self, model: Any, **options: Any) -> Plan:
        return make_plan(model, self.contract, PlanOptions(device="cpu", batch_size=2, **options))

    def only(self, model: Any, *names: str, **options: Any) -> Plan:
        """The plan with these passes alone."""
        others = tuple(rule.name for rule in registry() if rule.name not in names)
        asked = tuple(name for name in names if name != "precision")
        return self.plan(model, with_=asked, without=others, **options)

    def train(self, model: Any, plan: Plan, steps: int = 10, lr: float = 1e-4, decay: float = 0.01) -> Trained:
        """`steps` optimiser steps, each on another batch, driven as the trainer does it."""
        plan.lower(model)
        model.train()
        step, optimizer = training_step(model, lr, decay)
        batches = [self.batch(seed) for seed in range(steps)]
        batches = [replace(m, batch=trimmed(m.batch, plan.trims)) for m in batches]
        parts = plan.lower_step(StepParts(model, step, batches, optimizer, CPU))
        losses = [float(parts.step([minibatch])["loss"]) for minibatch in parts.loader]
        return Trained(losses, model, optimizer, plan)


def training_step(model: Any, lr: float = 1e-4, decay: float = 0.01) -> tuple[Step, Optimizer]:
    """The runtime's step around `model`, with AdamW."""
    groups = build_groups(model, lr=lr, floor=0.0, weight_decay=decay)
    optimizer = build_optimizer("AdamW", groups, Hyper())
    step = Step(
        FinetuneTrainer(),
        model,
        model,
        optimizer,
        Schedule("constant", warmup=0, total=100),
        ranks=Ranks(),
        guard=Guard(GuardConfig(), CPU),
        loss_scale=LossScale(False, CPU),
        clip=1.0,
    )
    return step, optimizer


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return Tiny(request.param)


@pytest.fixture(scope="session")
def pi05() -> Tiny:
    return Tiny("pi05")


@pytest.fixture(scope="session")
def make_step():
    return training_step


@pytest.fixture(scope="session")
def tiny_of():
    return Tiny
