"""The plan: which passes apply to a model, where, and why the others do not; then the lowering itself.

Passes are the `Pass` subclasses in `graphs/passes/*.py`, in the order of their `order`. Everything is decided before
anything is changed: sites and claims are collected first, conflicts are settled, fuel is counted, and only `lower`
touches the model. So a plan can be made, printed and compared on a model that lives on the meta device.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from torch import nn

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import Contract, Trim
from vlaforge.graphs import passes
from vlaforge.graphs.options import PlanOptions
from vlaforge.graphs.passes.base import Context, Numerics, Pass, Site, StepParts
from vlaforge.graphs.render import plan_dict, plan_text

State = Literal["on", "skip", "off"]
LOWERED = "_forge_lowered"


@cache
def registry() -> tuple[Pass, ...]:
    """All passes in the plan's order: one instance of each `Pass` subclass defined in `graphs/passes/`."""
    found = []
    for info in pkgutil.iter_modules(passes.__path__):
        module = importlib.import_module(f"{passes.__name__}.{info.name}")
        for value in vars(module).values():
            is_pass = isinstance(value, type) and issubclass(value, Pass) and not inspect.isabstract(value)
            if is_pass and value.__module__ == module.__name__:
                found.append(value())
    return tuple(sorted(found, key=lambda rule: (rule.stage != "module", rule.order, rule.name)))


@dataclass(frozen=True)
class Entry:
    """One line of the plan: a pass, its state, the reason, and the sites that will be changed.

    `found` is how many sites there were before fuel or conflicts took some away; `as_decided` is a numerics class
    other than the pass's own.
    """

    rule: Pass
    state: State
    reason: str
    sites: tuple[Site, ...] = ()
    found: int = 0
    as_decided: Numerics | None = None

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def numerics(self) -> Numerics:
        return self.as_decided or self.rule.numerics


@dataclass
class Plan:
    """What will be done to one model; see `make_plan`. `lower` may be called once."""

    family: str
    parameters: int
    contract: Contract
    options: PlanOptions
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...]
    context: Context
    lowered: bool = False

    def entry(self, name: str) -> Entry:
        """The line of the pass `name`; UserError when there is no such pass."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise unknown("pass", name, [entry.name for entry in self.entries])

    def on(self, name: str) -> bool:
        return self.entry(name).state == "on"

    @property
    def trims(self) -> tuple[Trim, ...]:
        """The axes that collate cuts: the contract's, where `trim_tokens` is on, in `static_shapes`' buckets."""
        if not self.on("trim_tokens"):
            return ()
        kept = {site.path for site in self.entry("trim_tokens").sites}
        trims = [trim for trim in self.contract.trims if trim.mask in kept]
        if not self.on("static_shapes"):
            return tuple(trims)
        buckets = {site.path: int(site.what.rsplit(" ", 1)[1]) for site in self.entry("static_shapes").sites}
        return tuple(replace(t, multiple=buckets.get(t.mask, t.multiple)) for t in trims)

    @property
    def feed(self) -> Contract:
        """The contract that the loader collates by: the model's, with the cuts that this plan makes."""
        return replace(self.contract, trims=self.trims)

    def lower(self, model: nn.Module) -> nn.Module:
        """Applies the module stage to `model` in place, in order, and returns it. Call it before any wrapper.

        `model` must have the structure that the plan was made for (meta or not); ValueError when it was lowered
        already, by this plan or another.
        """
        if self.lowered or getattr(model, LOWERED, False):
            raise ValueError("this plan or model was lowered already: make a fresh one")
        for entry in self.entries:
            if entry.state == "on" and entry.rule.stage == "module":
                entry.rule.apply(model, entry.sites, self.context)
        setattr(model, LOWERED, True)
        self.lowered = True
        return model

    def lower_step(self, parts: StepParts) -> StepParts:
        """Applies the step stage: the returned parts are what the runtime drives."""
        for entry in self.entries:
            if entry.state == "on" and entry.rule.stage == "step":
                entry.rule.apply(parts, entry.sites, self.context)
        return parts

    def text(self) -> str:
        """The numbered plan as `forge-run --plan` prints it."""
        return plan_text(self)

    def json(self) -> dict[str, Any]:
        """The plan as plain values, for a run's folder, its checkpoints and benchmark records."""
        return plan_dict(self)


def make_plan(model: nn.Module, contract: Contract, options: PlanOptions | None = None) -> Plan:
    """Decides on every pass for `model` (on any device, the meta device too) without changing it.

    Raises UserError for a mistyped pass in `with_` or `without`, and for two passes that were both asked for and
    cannot both have the same place; ValueError for a model that was lowered already.
    """
    options = options or PlanOptions()
    if getattr(model, LOWERED, False):
        raise ValueError("this model was lowered already: plan for a fresh one")
    known = [rule.name for rule in registry()]
    for name in (*options.with_, *options.without):
        if name not in known:
            raise unknown("pass", name, known)
    banned: dict[str, str] = {}
    while True:
        context = Context(contract, options)
        entries = [_decide(rule, model, context, banned) for rule in registry()]
        entries, lost = _settle(entries, context)
        if not lost:
            break
        banned.update(lost)
    entries = _burn(entries, options.fuel)
    warnings = tuple(
        f"'{entry.name}' was asked for but does not apply: {entry.reason}"
        for entry in entries
        if entry.name in context.asked and entry.state != "on"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    family = getattr(model, "family", type(model).__name__)
    return Plan(family, parameters, contract, options, tuple(entries), warnings, context)


def _decide(rule: Pass, model: nn.Module, context: Context, banned: dict[str, str]) -> Entry:
    if rule.name in context.options.without:
        return Entry(rule, "off", "switched off by --without")
    if rule.name in banned:
        return Entry(rule, "skip", banned[rule.name])
    if not rule.default and rule.name not in context.asked:
        return Entry(rule, "skip", f"on request: --with {rule.name}")
    decision = rule.decide(model, context)
    if not decision.on:
        return Entry(rule, "skip", decision.reason)
    sites = tuple(rule.sites(model, context))
    if not sites:
        return Entry(rule, "skip", "nothing in this model to change")
    context.on.append(rule.name)
    return Entry(rule, "on", decision.reason or rule.describe(sites), sites, len(sites), decision.numerics)


def _settle(entries: Sequence[Entry], context: Context) -> tuple[list[Entry], dict[str, str]]:
    """Resolves double claims: what was asked for wins over what is on by default, else the earlier pass wins.

    The loser keeps its other sites. Also returns the passes that lost all of theirs, with the reason.
    """
    owner: dict[str, str] = {}
    losing: dict[str, set[Site]] = {}
    against: dict[str, str] = {}
    by_name = {entry.name: entry for entry in entries}
    for entry in entries:
        for site in entry.sites:
            for resource in site.claims:
                holder = owner.setdefault(resource, entry.name)
                if holder == entry.name:
                    continue
                loser = _loser(holder, entry.name, resource, context)
                winner = entry.name if loser == holder else holder
                owner[resource] = winner
                losing.setdefault(loser, set()).update(s for s in by_name[loser].sites if resource in s.claims)
                against[loser] = f"'{winner}' has the same place ({resource.split(':', 1)[1] or 'the model'})"
    settled, lost = [], {}
    for entry in entries:
        if entry.name in losing:
            sites = tuple(site for site in entry.sites if site not in losing[entry.name])
            if not sites:
                lost[entry.name] = f"{against[entry.name]}; choose it with --with {entry.name}"
            entry = replace(entry, sites=sites, reason=f"{entry.rule.describe(sites)}; elsewhere {against[entry.name]}")
        settled.append(entry)
    return settled, lost


def _loser(holder: str, other: str, resource: str, context: Context) -> str:
    if holder in context.asked and other in context.asked:
        place = resource.split(":", 1)[1] or "the model"
        raise UserError(f"Passes '{holder}' and '{other}' both change {place}: ask for one of them only.")
    return holder if other in context.asked else other


def _burn(entries: Sequence[Entry], fuel: int | None) -> list[Entry]:
    if fuel is None:
        return list(entries)
    burnt, left = [], fuel
    for entry in entries:
        if entry.state == "on":
            sites = entry.sites[:left]
            left -= len(sites)
            if not sites:
                entry = replace(entry, state="skip", reason=f"--fuel {fuel} was used up before it", sites=())
            elif len(sites) < len(entry.sites):
                entry = replace(
                    entry, sites=sites, reason=f"{entry.rule.describe(sites)}; --fuel ended at {sites[-1].path}"
                )
        burnt.append(entry)
    return burnt
