"""Our side of a training benchmark: a model, lowered by a plan, stepped as the trainer steps it.

A side is anything with ``run(steps) -> Timed``; a peer in another interpreter is one too (`bench.peer`). `interleave`
lets sides take turns, so that a noisy machine is noisy to all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from vlaforge.bench.prompts import write_prompts
from vlaforge.data.collate import trimmed
from vlaforge.data.errors import UserError
from vlaforge.data.schema import Contract, Minibatch, make_draw
from vlaforge.graphs import Plan, PlanOptions, StepParts, make_plan
from vlaforge.models import Family, family
from vlaforge.runtime.guards import Guard, GuardConfig, LossScale
from vlaforge.runtime.optim import Hyper, build_optimizer, fading
from vlaforge.runtime.params import build_groups, rebind
from vlaforge.runtime.programs import FinetuneTrainer
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.schedules import Schedule
from vlaforge.runtime.step import Step

CASES = Path(__file__).parent / "cases.yaml"
LR, DECAY, CLIP = 2.5e-5, 0.01, 1.0
"""Rate, weight decay (where a case has none of its own) and clip norm of both sides; AdamW with betas 0.9 and 0.95."""


@dataclass
class Timed:
    """Seconds and loss of each step, in order.

    `cpu` are the seconds that the process computed in each, over all threads: beside others on a busy machine they say
    more than the clock on the wall (with one thread; more of them also count their waiting for each other).
    """

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, other: Timed) -> None:
        self.seconds += other.seconds
        self.losses += other.losses
        self.cpu += other.cpu

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        whole = {
            "p50": statistics.median(ordered),
            "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "min": ordered[0],
            "n": len(ordered),
        }
        return whole | ({"cpu_p50": statistics.median(self.cpu)} if self.cpu else {})


class Side(Protocol):
    name: str

    def run(self, steps: int) -> Timed: ...


@dataclass(frozen=True)
class Case:
    """One family's inputs: config, contract, batch size, and minibatches on the CPU, with nothing cut yet.

    `grouping` is how the official recipe groups parameters: arguments of `build_groups`; `decay` its weight decay.
    """

    family: Family
    name: str
    config: Any
    contract: Contract
    batch_size: int
    minibatches: tuple[Minibatch, ...]
    valid: Mapping[str, int]
    grouping: Mapping[str, str] = field(default_factory=dict)
    decay: float = DECAY

    @property
    def embodiments(self) -> frozenset[int] | None:
        """Those of the batches; None where there is no such field."""
        fields = [minibatch.batch.get("embodiment") for minibatch in self.minibatches]
        return None if any(f is None for f in fields) else frozenset(int(number) for f in fields for number in f)

    @property
    def sizes(self) -> dict[str, int]:
        """Filled entries of each trimmable mask, for the cost model."""
        masks = {trim.mask for trim in self.contract.trims}
        return {name: count for name, count in self.valid.items() if name in masks}


def load_case(model: str, name: str, batches: int = 2, preset: str = "midsize", batch_size: int | None = None) -> Case:
    """The case `name` of the family `model`; UserError when the family has none."""
    chosen = family(model)
    cases = yaml.safe_load(CASES.read_text())
    if "absent" in cases.get(chosen.name, {}):
        raise UserError(f"There is no training benchmark for '{chosen.name}': {cases[chosen.name]['absent']}.")
    if chosen.name not in cases or preset not in chosen.presets():
        ready = ", ".join(sorted(cases))
        raise UserError(f"There is no training benchmark for '{chosen.name}' yet: bench/cases.yaml has {ready}.")
    if name not in cases[chosen.name]:
        raise UserError(f"Unknown case '{name}': {chosen.name} has as_shipped and tight.")
    case = cases[chosen.name][name]
    config = config_of(chosen, preset, case.get("model", {}))
    contract = chosen.model.contract(config)
    size = batch_size or cases[chosen.name]["batch_size"]
    made = tuple(make_minibatch(contract, size, seed, case.get("valid", {})) for seed in range(batches))
    for minibatch in made if "words" in case else ():
        write_prompts(chosen, config, minibatch.batch, case["words"])
    grouping = cases[chosen.name].get("grouping", {})
    decay = cases[chosen.name].get("weight_decay", DECAY)
    return Case(chosen, name, config, contract, size, made, case.get("valid", {}), grouping, decay)


def full_case(
    model: str, batch_size: int, views: int, prompt: int, batches: int = 2, preset: str | None = None
) -> Case:
    """The full-size model (or a preset) with `views` camera slots and `prompt` tokens filled, where it has as many; the
    robot's dimensions are the padded ones."""
    chosen = family(model)
    config = config_of(chosen, preset) if preset else chosen.config()
    contract = chosen.model.contract(config)
    wanted = {"image_mask": views, "token_mask": prompt}
    valid = {mask: min(n, contract.fields[mask].shape[0]) for mask, n in wanted.items() if mask in contract.fields}
    made = tuple(make_minibatch(contract, batch_size, seed, valid) for seed in range(batches))
    return Case(chosen, "full", config, contract, batch_size, made, valid)


def config_of(chosen: Family, preset: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """A preset's model configuration, read without the command line's machinery (a GPU machine may lack it)."""
    given = yaml.safe_load(chosen.presets()[preset].read_text()).get("model", {})
    return _filled(chosen.config(), {**given, **(overrides or {})})


def _filled(default: Any, values: Mapping[str, Any]) -> Any:
    nested = {
        name: _filled(getattr(default, name), value)
        for name, value in values.items()
        if isinstance(value, Mapping) and is_dataclass(getattr(default, name))
    }
    return replace(default, **{**values, **nested})


def make_minibatch(contract: Contract, size: int, seed: int, valid: Mapping[str, int]) -> Minibatch:
    """A synthetic micro-batch whose masks are filled as `valid` says: ``mask`` its first axis, ``mask.-1`` its last."""
    batch = contract.synthetic(size, seed)
    for key, count in valid.items():
        name, _, axis = key.partition(".")
        mask = batch[name]
        mask.narrow(int(axis or 1), count, mask.shape[int(axis or 1)] - count).fill_(False)
    ids = range(seed * size, (seed + 1) * size)
    return Minibatch(batch, make_draw(contract.draws, ids, seed=0, epoch=0), torch.tensor(list(ids)))


def fresh_model(case: Case, seed: int = 0, device: torch.device | str = "cpu") -> Any:
    """The case's model with random weights, none of them zero, so that no branch can hide."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = case.family.model(case.config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not bool(parameter.any()):
                torch.nn.init.normal_(parameter, std=0.02)
    return model


class Ours:
    """`model` under the plan for `options`, with AdamW on fp32 masters.

    Args:
        state: weights to start from; None keeps the model's own.
    """

    def __init__(self, name: str, case: Case, options: PlanOptions, state: Mapping[str, torch.Tensor] | None = None):
        self.name, self.case = name, case
        cuda = options.device_kind.cuda and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        model = fresh_model(case, device=self.device)
        if state is not None:
            model.load_state_dict(dict(state))
        groups = build_groups(model, lr=LR, floor=0.0, weight_decay=case.decay, **case.grouping)
        known = {
            "batch_size": case.batch_size,
            "groups": {name: group.name for group in groups for name in group.params},
            "fading": fading("AdamW", groups),
            "embodiments": case.embodiments,
        }
        self.plan: Plan = make_plan(model, case.contract, replace(options, **known))
        self.plan.lower(model)
        model.train()
        optimizer = build_optimizer("AdamW", rebind(groups, model), Hyper())
        # The official steps train on any loss, and with random weights X-VLA's is in the thousands.
        self.guard = Guard(GuardConfig(spike_threshold=None), self.device)
        step = Step(
            FinetuneTrainer(),
            model,
            model,
            optimizer,
            Schedule("constant", warmup=0, total=1000),
            ranks=Ranks(),
            guard=self.guard,
            loss_scale=LossScale(False, self.device),
            clip=CLIP,
        )
        cut = [replace(m, batch=trimmed(m.batch, self.plan.trims)) for m in case.minibatches]
        loader = _Turns([m.pin_memory() for m in cut] if cuda else cut)
        parts = self.plan.lower_step(StepParts(model, step, loader, optimizer, self.device))
        self.model, self.optimizer = model, optimizer
        self._step, self._feed = parts.step, iter(parts.loader)

    def run(self, steps: int) -> Timed:
        """`steps` training steps, each on the next batch in turn. On a GPU the host does not wait between them."""
        timed = self._run_ahead(steps) if self.device.type == "cuda" else self._run(steps)
        refused = self.guard.state()["skipped"]
        if refused:
            raise UserError(
                f"{self.name}: {refused} steps were refused for a loss or gradient that is not finite; the time of a "
                "step that does not update the weights says nothing."
            )
        return timed

    def _run(self, steps: int) -> Timed:
        timed = Timed()
        for _ in range(steps):
            began, cpu = time.perf_counter(), time.process_time()
            loss = float(self._step([next(self._feed)])["loss"])
            timed.seconds.append(time.perf_counter() - began)
            timed.cpu.append(time.process_time() - cpu)
            timed.losses.append(loss)
        return timed

    def _run_ahead(self, steps: int) -> Timed:
        """As the trainer drives it between log points: times are those between the ends of steps on the device."""
        marks, losses = [torch.cuda.Event(enable_timing=True)], []
        torch.cuda.synchronize(self.device)
        marks[0].record()
        for _ in range(steps):
            minibatch = next(self._feed)
            if not next(iter(minibatch.batch.values())).is_cuda:
                minibatch = minibatch.to(self.device)
            losses.append(self._step([minibatch])["loss"])
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        torch.cuda.synchronize(self.device)
        seconds = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
        return Timed(seconds, [float(loss) for loss in losses])

    def close(self) -> None:
        del self.model, self.optimizer, self._step, self._feed


class _Turns:
    """Gives its minibatches in turn, forever."""

    def __init__(self, minibatches: Sequence[Minibatch]):
        self.minibatches = minibatches

    def __iter__(self) -> Any:
        while True:
            yield from self.minibatches


def interleave(
    sides: Sequence[Side], rounds: int, steps: int, warmup: int
) -> tuple[dict[str, Timed], dict[str, Timed]]:
    """(warm-up, measured) by side: `warmup` steps each, then `rounds` turns of `steps` steps each."""
    warm = {side.name: side.run(warmup) for side in sides}
    measured = {side.name: Timed() for side in sides}
    for _ in range(rounds):
        for side in sides:
            measured[side.name].add(side.run(steps))
    return warm, measured
