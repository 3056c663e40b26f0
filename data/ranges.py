"""Which numbers a setting may have: the bounds that its field declares, else those that its type and name imply.

    depth: int = 18                          a size: 1 to 2**20
    eps: float = 1e-6                        by its name above 0
    tune_top_llm_layers: int = ranged(4, low=0)

So a number that no model can have ends in one sentence before anything is built with it, in every family alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from typing import Any, get_args, get_origin

from vlaforge.data.errors import UserError

LARGEST_SIZE = 2**20
"""Of widths, lengths and counts; more is a slip of the finger, and would end in the machine's memory."""

IMPLIED: tuple[tuple[str, dict[str, float]], ...] = (
    (r"dropout|drop_path", {"low": 0, "below": 1}),
    (r"_prob$|_fraction$", {"low": 0, "high": 1}),
    (r"(^|_)(eps|theta|ratio|period|alpha|beta|shift|fps|clip)$", {"above": 0}),
    (r"_token$", {"low": 0}),
    (r"^(num_)?(depth|depths|layers)$", {"low": 1, "high": 1000}),
    (r"^num_(images|views|image_views)$", {"low": 1, "high": 64}),
    (r"image_size$|image_edge$", {"low": 1, "high": 8192}),
)
"""(pattern of a field's name, bounds)"""

_WORDS = {"low": "at least", "above": "above", "high": "at most", "below": "below"}


def ranged(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its own inclusive (`low`, `high`) and exclusive bounds instead of the implied ones."""
    return field(default=default, metadata={"low": low, "high": high, "above": above, "below": below})


def in_words(bounds: Mapping[str, Any]) -> str:
    """``at least 1 and below 2``; empty without bounds."""
    given = {key: bounds[key] for key in _WORDS if bounds.get(key) is not None}
    shown = {key: str(value) if isinstance(value, int) else f"{value:g}" for key, value in given.items()}
    return " and ".join(f"{_WORDS[key]} {value}" for key, value in shown.items())


def fault(value: Any, bounds: Mapping[str, Any]) -> str:
    """What `value` must be and is not (``at least 1``), empty when it fits; what is no number always fits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "a finite number"
    low, high, above, below = (bounds.get(key) for key in ("low", "high", "above", "below"))
    if (
        (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    ):
        return in_words(bounds)
    return "within 64 bits" if isinstance(value, int) and abs(value) >= 2**63 else ""


def check_numbers(cls: type, hints: Mapping[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Raises UserError for the first number in `values` that its field of the dataclass `cls` cannot have.

    Args:
        hints: the resolved annotations of `cls`.
        where: dotted name of the configuration, for the message.
    """
    for item in fields(cls):
        if "group" in item.metadata or values.get(item.name, item.default) == item.default:
            continue  # flags check themselves
        value = values[item.name]
        bounds = item.metadata if "low" in item.metadata else _implied(item.name, hints[item.name])
        for number in value if isinstance(value, list | tuple) else (value,):
            wanted = fault(number, bounds)
            if not wanted and isinstance(number, int) and number > (bounds.get("high") or LARGEST_SIZE):
                wanted = f"at most {LARGEST_SIZE}"
            if wanted:
                raise UserError(f"{where}.{item.name} is {_shown(value)}: it must be {wanted}.")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _implied(name: str, annotation: Any) -> Mapping[str, float]:
    for pattern, bounds in IMPLIED:
        if re.search(pattern, name):
            return bounds
    kinds = set(_leaves(annotation))
    if int in kinds:  # a list may hold positions, which count from 0
        return {"low": 0 if tuple in kinds else 1}
    return {"low": 0} if float in kinds else {}


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of: of ``tuple[int, ...] | None`` tuple, int and NoneType."""
    yield get_origin(annotation) or annotation
    for inner in get_args(annotation):
        yield from _leaves(inner)
