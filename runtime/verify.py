"""``--verify-compile N``: the plan as asked for against a plan that changes nothing but the precision, N steps each.

Both start from the same weights and see the same samples and noise. A compiled or fused step that computes something
else shows in the first losses or gradient norms, before hours are spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from vlaforge.data.errors import UserError
from vlaforge.runtime.assemble import assemble, build_model, build_plan, to_device
from vlaforge.runtime.meter import StageTimer
from vlaforge.runtime.params import build_groups_of
from vlaforge.runtime.process import prepare
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.setup import Setup

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Largest relative difference of a loss; of a gradient norm ten times that, for it sums what the loss averages."""
KEPT = ("precision", "freeze", "trim_tokens")
"""Passes that both sides have: they are what was asked to be computed, not how."""


@dataclass(frozen=True)
class Trace:
    """Loss and gradient norm of each step."""

    loss: list[float]
    grad_norm: list[float]


def trace(setup: Setup, ranks: Ranks, steps: int) -> Trace:
    """Runs `steps` optimiser steps of a fresh run of `setup`; nothing is saved or logged."""
    prepare(setup.args, ranks.rank)
    model = build_model(setup, None, lambda text: None)
    groups = build_groups_of(setup.args, model)
    parts = assemble(setup, model, groups, build_plan(setup, model, groups), ranks, StageTimer(setup.device))
    found = Trace([], [])
    try:
        batches = to_device(parts.loader, setup.device)
        for _ in range(steps):
            metrics = parts.step(list(islice(batches, parts.micro_batches)))
            found.loss.append(float(metrics["loss"]))
            found.grad_norm.append(float(metrics["grad_norm"]))
    finally:
        parts.feed.close()
    return found


def verify(setup: Setup, ranks: Ranks) -> str:
    """The table of ``--verify-compile``; UserError when a step is outside the tolerance."""
    args = setup.args
    plain_args = replace(args, compile=False, with_passes=(), without_passes=_all_but_kept())
    plain = replace(setup, resolved=replace(setup.resolved, args=plain_args))
    expected = trace(plain, ranks, args.verify_compile)
    found = trace(setup, ranks, args.verify_compile)
    return compare(expected, found, TOLERANCE[args.dtype])


def _all_but_kept() -> tuple[str, ...]:
    from vlaforge.graphs import registry

    return tuple(rule.name for rule in registry() if rule.name not in KEPT)


def compare(expected: Trace, found: Trace, tolerance: float) -> str:
    """One line a step; UserError with the first that differs too much."""
    lines = ["--verify-compile: plain and lowered model, same weights, samples and noise"]
    lines.append(f"{'step':>6}{'loss plain':>14}{'lowered':>14}{'rel. diff':>12}{'grad norm diff':>16}")
    rows = zip(expected.loss, found.loss, expected.grad_norm, found.grad_norm)
    for step, (loss, other, norm, other_norm) in enumerate(rows, start=1):
        off, off_norm = _relative(loss, other), _relative(norm, other_norm)
        lines.append(f"{step:>6}{loss:>14.6f}{other:>14.6f}{off:>12.1e}{off_norm:>16.1e}")
        if not (off <= tolerance and off_norm <= 10 * tolerance):
            raise UserError(
                f"--verify-compile: at step {step} the lowered model has loss {other:.6g} and gradient norm "
                f"{other_norm:.6g}, the plain one {loss:.6g} and {norm:.6g}: find the pass with --without NAME "
                f"or --fuel N."
            )
    lines.append(f"within {tolerance:g} (loss) and {10 * tolerance:g} (gradient norm)")
    return "\n".join(lines)


def _relative(x: float, y: float) -> float:
    return abs(x - y) / max(abs(x), 1e-12)
