"""Our numbers against the recorded ones of an official implementation: what is compared, how far apart, and
the verdict.

Every tensor of `expected.safetensors` and every gradient norm ends in one row: within its tolerance, outside, or not
compared with the reason. A family's `golden.py` gives its quantities; gradients and optimiser steps are taken here, in
canonical parameter names, of the model as it was lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vlaforge.data.collate import trimmed
from vlaforge.data.errors import UserError
from vlaforge.models import Family
from vlaforge.models.convert import Account, Rule
from vlaforge.models.golden import Base, Folder, Kind, Quantity

TOTAL = ("grad_total_norm", "grad_norm_total")
FLOOR = 1e-7
"""Share of the total gradient norm below which a norm is rounding noise: officially some gradients are zero
but for it (the biases of keys, which a softmax does not see).
"""


@dataclass(frozen=True)
class Tolerance:
    """`share` of the largest recorded value (``max``), or of each value (``rel``)."""

    share: float
    of: str = "max"

    def text(self) -> str:
        return "equal" if self.share == 0 else f"{self.share:.0e} {self.of}"


TOLERANCES: dict[Kind, Tolerance] = {
    "exact": Tolerance(0.0),
    "loss": Tolerance(1e-5, "rel"),
    "activation": Tolerance(1e-4),
    "output": Tolerance(1e-4),
    "gradient": Tolerance(1e-3),
    "norm": Tolerance(1e-3, "rel"),
    "trajectory": Tolerance(1e-4, "rel"),
    "sample": Tolerance(1e-4),
    "bfloat16": Tolerance(3e-2),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is None where nothing was compared; then `note` says why."""

    name: str
    largest: float = 0.0
    relative: float = 0.0
    tolerance: str = ""
    ok: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        return {True: "ok", False: "OUTSIDE", None: "not compared"}[self.ok]


@dataclass
class Report:
    """All rows, in the order of the comparison."""

    model: str
    account: Account
    plan: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def compared(self) -> list[Row]:
        return [row for row in self.rows if row.ok is not None]

    @property
    def passed(self) -> bool:
        """Everything compared is within, and everything else says why it was not."""
        return bool(self.compared) and all(row.ok or (row.ok is None and row.note) for row in self.rows)

    def last_line(self) -> str:
        within = sum(bool(row.ok) for row in self.compared)
        return f"parity {self.model}: {within} of {len(self.compared)} within tolerance"


Lower = Callable[[nn.Module, Base], str]
"""Lowers the model in place (and may set the golden's `cut`); returns the plan's text."""


def compare(family: Family, path: Path | str, lower: Lower | None = None) -> Report:
    """Runs the whole comparison. UserError for a folder that is none, or weights that do not fit."""
    golden: Base = golden_of(family)(Folder.read(path))
    plain = golden.model()
    account = golden.load(plain)
    report = Report(family.name, account)
    lowered = plain
    if lower is not None:
        lowered = golden.model()
        golden.load(lowered)
        report.plan = lower(lowered, golden)
        golden.lower = lambda model: lower(model, golden)
    seen: set[str] = set()
    for row in _rows(golden, plain, lowered, account):
        seen.add(row.name)
        report.rows.append(row)
    for name in golden.folder.expected:
        if name not in seen:
            report.rows.append(Row(name, ok=False, note="the family's golden.py does not say what this is"))
    return report


def golden_of(family: Family) -> type[Base]:
    """The family's `Golden`; UserError when it has none."""
    try:
        return family.part("golden").Golden
    except ModuleNotFoundError as error:
        if error.name != f"{family.package}.golden":
            raise
        raise UserError(
            f"{family.name} has no recorded results to compare with (no golden.py in its folder)."
        ) from None


def _rows(golden: Base, plain: nn.Module, lowered: nn.Module, account: Account) -> Iterator[Row]:
    expected = golden.folder.expected
    for quantity in golden.quantities(plain, lowered):
        if quantity.name in expected:
            if quantity.inside and lowered is not plain:
                note = "; ".join(filter(None, ["before lowering", quantity.note]))
                quantity = replace(quantity, note=note)
            yield judge(quantity, expected[quantity.name])
    if golden.folder.grad_norms or any(name.startswith(("grad.", "grad_norm.")) or name in TOTAL for name in expected):
        yield from _gradients(golden, lowered, account)
    if any(name.startswith(("adamw_", "after1step.")) for name in expected):
        yield from _steps(golden, lowered, account)


def judge(quantity: Quantity, theirs: Tensor) -> Row:
    """The row of one quantity. The relative difference is measured against the largest recorded value, or
    each value.
    """
    name, note = quantity.name, quantity.note
    if quantity.ours is None:
        return Row(name, note=note)
    ours, theirs = quantity.ours.detach().double(), theirs.double()
    tolerance = TOLERANCES[quantity.kind]
    if ours.shape != theirs.shape:
        shapes = f"our shape is {tuple(ours.shape)}, the recorded one {tuple(theirs.shape)}"
        return Row(name, float("inf"), float("inf"), tolerance.text(), False, shapes)
    difference = (ours - theirs).abs()
    if quantity.where is not None:
        kept = quantity.where.expand_as(difference)
        difference, theirs = difference[kept], theirs[kept]
    if not difference.numel():
        return Row(name, note="no element is compared")
    size = theirs.abs()
    size = size if tolerance.of == "rel" else size.max()
    relative = (difference / size.clamp_min(1e-30)).max().item()
    largest = difference.max().item()
    ok = largest == 0.0 if tolerance.share == 0.0 else relative <= tolerance.share
    return Row(name, largest, relative, tolerance.text(), ok, note)


# ---------------------------------------------------------------------------------------------- gradients


def canonical_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients under the names of `state_dict`, whatever storage passes gave the parameters; None where
    there is none.

    Every parameter shows its gradient in place of its value for a moment, so that the hooks which undo a packing do the
    same to gradients; NaN marks those that have none.
    """
    values = {parameter: parameter.data for parameter in model.parameters()}
    try:
        for parameter, value in values.items():
            gradient = parameter.grad
            parameter.data = torch.full_like(value, torch.nan) if gradient is None else gradient.to(value.dtype)
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    finally:
        for parameter, value in values.items():
            parameter.data = value
    buffers = {name for name, _ in model.named_buffers()}
    return {
        name: None if value.is_floating_point() and value.isnan().all() else value
        for name, value in state.items()
        if name not in buffers
    }


class _Places:
    """Official names in results → ours. They may be of another layout than the weights (X-VLA's are)."""

    def __init__(self, golden: Base, account: Account):
        first = golden.layouts[account.layout]
        self.layouts = [first, *(layout for layout in golden.layouts.values() if layout is not first)]

    def _place(self, official: str) -> tuple[str, Rule | None]:
        found = (layout.place(official) for layout in self.layouts)
        return next((place for place in found if place is not None), ("", None))

    def ours(self, official: str) -> str:
        """Our name, or "" when no layout knows the official one."""
        return self._place(official)[0]

    def like(self, official: str, theirs: Tensor, ours: Tensor | None) -> Tensor:
        """The official tensor in the form of ours."""
        rule = self._place(official)[1]
        return theirs if rule is None or ours is None else rule.to_ours(theirs, ours.shape)


def _gradients(golden: Base, model: nn.Module, account: Account) -> Iterator[Row]:
    folder, place = golden.folder, _Places(golden, account)
    model.zero_grad(set_to_none=True)
    golden.loss(model).backward()
    ours = canonical_gradients(model)
    total = sum(g.double().square().sum() for g in ours.values() if g is not None).sqrt().item()
    for name in TOTAL:
        if name in folder.expected:
            yield judge(Quantity(name, torch.tensor(total), "norm"), folder.expected[name])
    for name, theirs in folder.expected.items():
        kind, _, official = name.partition(".")
        if kind == "grad":
            gradient = ours.get(place.ours(official))
            note = "" if gradient is not None else "no gradient"
            yield judge(Quantity(name, gradient, "gradient", note), place.like(official, theirs, gradient))
        elif kind == "grad_norm":
            yield _norm(name, ours.get(place.ours(official)), theirs.item(), total)
    named: set[str] = set()
    for official, theirs in folder.grad_norms.items():
        named.add(place.ours(official))
        yield _norm(f"|grad| {official}", ours.get(place.ours(official)), theirs, total)
    if folder.grad_norms:
        for name, gradient in ours.items():
            if gradient is not None and name not in named and gradient.norm().item() > FLOOR * total:
                yield Row(f"|grad| {name}", gradient.norm().item(), ok=False, note="officially there is no gradient")


def _norm(name: str, gradient: Tensor | None, theirs: float, total: float) -> Row:
    """A gradient's norm; officially zero where ours was never computed is the same thing."""
    ours = 0.0 if gradient is None else gradient.double().norm().item()
    difference = abs(ours - theirs)
    tolerance = TOLERANCES["norm"]
    noise = FLOOR * total
    ok = difference <= max(tolerance.share * abs(theirs), noise)
    note = "not computed: nothing reads it" if gradient is None and ok else ""
    if ok and gradient is not None and max(ours, abs(theirs)) <= noise:
        note = "zero but for rounding"
    return Row(name, difference, difference / max(abs(theirs), noise, 1e-30), tolerance.text(), ok, note)


# ---------------------------------------------------------------------------------------------- steps


def _steps(golden: Base, model: nn.Module, account: Account) -> Iterator[Row]:
    """The recorded number of AdamW steps on the same batch and draw; changes the model's weights."""
    expected, place = golden.folder.expected, _Places(golden, account)
    optimizer = torch.optim.AdamW(golden.groups(model), **golden.adamw)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    count = max((len(expected[n]) for n in expected if n.startswith("adamw_")), default=1)
    losses, norms, after = [], [], {}
    for step in range(count):
        optimizer.zero_grad(set_to_none=True)
        loss = golden.loss(model)
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(trained, golden.clip))
        optimizer.step()
        if step == 0:
            after = {name: value.detach().clone() for name, value in model.state_dict().items()}
    taken: Mapping[str, Sequence[Tensor]] = {"adamw_loss_trajectory": losses, "adamw_clip_norms": norms}
    for name, values in taken.items():
        if name in expected:
            kind: Kind = "trajectory" if name == "adamw_loss_trajectory" else "norm"
            yield judge(Quantity(name, torch.stack(list(values)), kind), expected[name])
    for name, theirs in expected.items():
        if name.startswith("after1step."):
            official = name.removeprefix("after1step.")
            weight = after.get(place.ours(official))
            theirs = place.like(official, theirs, weight)
            yield judge(Quantity(name, weight, "gradient", "after one step"), theirs)


# ---------------------------------------------------------------------------------------------- text


def table(report: Report, verbose: bool = False) -> str:
    """The table as text. Gradient norms share a line, unless one is outside or `verbose` is set."""
    rows = list(report.rows)
    if not verbose:
        norms = [row for row in rows if row.name.startswith("|grad| ") and row.ok]
        rows = [row for row in rows if row not in norms]
        if norms:
            worst = max(norms, key=lambda row: row.relative)
            note = f"largest: {worst.name.removeprefix('|grad| ')}"
            rows.append(Row(f"{len(norms)} gradient norms", worst.largest, worst.relative, worst.tolerance, True, note))
    width = max(len(row.name) for row in rows)
    lines = [f"{'quantity':<{width}}  {'max abs':>9}  {'max rel':>9}  {'tolerance':>9}  verdict"]
    for row in rows:
        numbers = f"{row.largest:9.2e}  {row.relative:9.2e}" if row.ok is not None else f"{'':9}  {'':9}"
        note = f"  ({row.note})" if row.note else ""
        lines.append(f"{row.name:<{width}}  {numbers}  {row.tolerance:>9}  {row.verdict}{note}")
    return "\n".join(lines)


def lower_with(**options) -> Lower:
    """How `forge-parity` lowers: the plan for these options, its trims applied to what the lowered model is
    given.
    """
    from vlaforge.graphs import PlanOptions, make_plan

    def lower(model: nn.Module, golden: Base) -> str:
        batch, _ = golden.inputs()
        contract = model.contract(model.config)
        plan = make_plan(model, contract, PlanOptions(batch_size=batch.size, **options))
        plan.lower(model)
        golden.cut = lambda given: trimmed(given, plan.trims)
        return plan.text()

    return lower
