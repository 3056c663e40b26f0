"""The plan as text for people and as plain values for records."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vlaforge.data.dtypes import SHORT

if TYPE_CHECKING:
    from vlaforge.graphs.plan import Plan


def count_text(count: int) -> str:
    """A parameter count as people say it: ``3.3 B``, ``54.1 M``, ``812``."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return str(count)


def headline(plan: Plan) -> str:
    """``pi05 · 3.6 B parameters · bf16 · 1 × H200 · batch 32 · actions 50 × 32``."""
    options = plan.options
    batch = f"batch {options.batch_size}" + (f" × {options.accumulate}" if options.accumulate > 1 else "")
    parts = [
        plan.family,
        f"{count_text(plan.parameters)} parameters",
        SHORT[options.dtype],
        f"{options.world} × {options.device_kind.label}",
        batch,
    ]
    if options.strategy != "none":
        parts.insert(4, options.strategy)
    actions = plan.contract.fields.get("actions")
    if actions is not None:
        parts.append("actions " + " × ".join(map(str, actions.shape)))
    return " · ".join(parts)


def plan_text(plan: Plan) -> str:
    """Numbered lines of state, pass, reason and numerics class, under one line that says for what."""
    names = max(len(entry.name) for entry in plan.entries)
    reasons = max(len(entry.reason) for entry in plan.entries)
    lines = [f"forge plan   {headline(plan)}"]
    for number, entry in enumerate(plan.entries, start=1):
        what = f"{entry.name:<{names}}  {entry.reason:<{min(reasons, 76)}}"
        lines.append(f"{number:2d} {entry.state:<5} {what}  {entry.numerics}")
    lines += [f" ! {warning}" for warning in plan.warnings]
    return "\n".join(lines)


def plan_dict(plan: Plan) -> dict[str, Any]:
    options = plan.options
    return {
        "family": plan.family,
        "parameters": plan.parameters,
        "headline": headline(plan),
        "options": {
            "dtype": options.dtype,
            "device": options.device_kind.name,
            "compile": options.compile,
            "remat": options.remat,
            "batch_size": options.batch_size,
            "accumulate": options.accumulate,
            "world": options.world,
            "strategy": options.strategy,
            "frozen": len(options.frozen),
            "fp32_masters": options.fp32_masters,
            "with": list(options.with_),
            "without": list(options.without),
            "fuel": options.fuel,
        },
        "passes": [
            {
                "name": entry.name,
                "state": entry.state,
                "stage": entry.rule.stage,
                "numerics": entry.numerics,
                "reason": entry.reason,
                "sites": [{"path": site.path, "what": site.what} for site in entry.sites],
                "found": entry.found,
            }
            for entry in plan.entries
        ],
        "trims": [asdict(trim) for trim in plan.trims],
        "warnings": list(plan.warnings),
    }
