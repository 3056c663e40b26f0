"""From a setup to everything that a training loop drives: model, plan, optimiser, step, loader.

The order matters: weights are loaded in fp32 under their canonical names, what does not train is frozen,
then the plan lowers the model in place, the wrapper goes around it, and the optimiser takes the masters
that the cast left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vlaforge.data.schema import Contract
from vlaforge.graphs import Plan, StepParts, make_plan
from vlaforge.graphs.passes.freeze import frozen_to_eval
from vlaforge.runtime import meta
from vlaforge.runtime.adapter import attach
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.checkpoint.resumed import check_kind
from vlaforge.runtime.checkpoint.weights import load_model, load_pretrained, own_layout
from vlaforge.runtime.ema import Ema
from vlaforge.runtime.guards import Guard, GuardConfig, LossScale
from vlaforge.runtime.meter import StageTimer
from vlaforge.runtime.optim import Group, Hyper, Optimizer, build_optimizer
from vlaforge.runtime.params import rebind, split_names
from vlaforge.runtime.preflight import run_options
from vlaforge.runtime.programs import FinetuneTrainer, program
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.schedules import build_schedule
from vlaforge.runtime.setup import Setup
from vlaforge.runtime.step import Step


@dataclass
class Parts:
    """What a run consists of once it is built. `loader` gives micro-batches on the device; `feed` is the
    loader behind it, whose state is saved. `step` may be captured; `core` is the step itself, with the
    counters."""

    model: nn.Module
    wrapped: nn.Module
    plan: Plan
    contract: Contract
    program: FinetuneTrainer
    optimizer: Optimizer
    ema: Ema | None
    core: Step
    step: Callable[..., Any]
    feed: Any
    loader: Any
    micro_batches: int


def build_model(setup: Setup, found: Path | None, note: Callable[[str], None]) -> nn.Module:
    """The model on the run's device in fp32: fresh, from `--pretrained-checkpoint`, or from the checkpoint
    `found` that the run resumes. Raises UserError when weights do not fit; `note` gets their account."""
    args, family = setup.args, setup.resolved.family
    if args.init_on_meta:
        with meta.parameters_on_meta():
            return family.model(setup.model_config)
    model = family.model(setup.model_config)
    if found is not None:
        note(f"Resuming from {found}")
        check_kind(found, args.use_lora)
    if found is not None and not args.use_lora:
        load_model(model, formats.read(found, "model"), own_layout())
    elif args.pretrained_checkpoint is not None:
        account = load_pretrained(model, family, args.pretrained_checkpoint, split_names(args.new_modules))
        note(f"Weights from {args.pretrained_checkpoint}\n  {account.text()}")
    program(args.trainer_type).prepare(model, setup)
    if args.use_lora:
        attach(model, args, found, note)
    return model.to(setup.device)


def build_plan(setup: Setup, model: nn.Module, groups: Sequence[Group]) -> Plan:
    """The plan for the present model and flags; changes nothing."""
    return make_plan(model, setup.contract, run_options(setup, model, groups))


def assemble(
    setup: Setup,
    model: nn.Module,
    groups: Sequence[Group],
    plan: Plan,
    ranks: Ranks,
    timer: StageTimer,
    filled: Callable[[nn.Module], None] = lambda model: None,
) -> Parts:
    """Lowers `model` by `plan`, wraps it, has `filled` give it missing values, and builds what steps it."""
    args = setup.args
    plan.lower(model)
    model.train()
    frozen_to_eval(model)
    wrapped = ranks.wrap(model, plan)
    filled(model)
    hyper = Hyper(args.adam_beta1, args.adam_beta2, args.adam_eps, args.sgd_momentum)
    optimizer = build_optimizer(args.optimizer, rebind(groups, model), hyper, args.master_weights)
    ema = Ema(optimizer, args.ema_decay) if args.ema_decay is not None else None
    guard = GuardConfig(args.loss_spike_threshold, args.check_for_nan_in_loss_and_grad, args.stop_after_skipped)
    chosen = program(args.trainer_type)
    core = Step(
        chosen,
        wrapped,
        model,
        optimizer,
        build_schedule(args),
        ranks=ranks,
        guard=Guard(guard, setup.device),
        loss_scale=LossScale(args.dtype == "float16", setup.device),
        clip=args.clip_grad,
        timer=timer,
    )
    contract = replace(setup.contract, trims=plan.trims)
    feed = chosen.loader(setup, contract, ranks)
    lowered = plan.lower_step(StepParts(wrapped, core, feed, optimizer, setup.device))
    return Parts(
        model, wrapped, plan, contract, chosen, optimizer, ema, core, lowered.step, feed, lowered.loader,
        chosen.micro_batches(setup),
    )  # fmt: skip


def to_device(loader: Any, device: torch.device) -> Any:
    """Micro-batches of `loader` on `device`, whether or not the plan has put a prefetcher in front."""
    for minibatch in loader:
        value = next(iter(minibatch.batch.values()))
        yield minibatch if value.device.type == device.type else minibatch.to(device, non_blocking=True)
