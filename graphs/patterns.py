"""Modules by pattern: ``vision.layers.*,layers.*.expert``. A pattern has as many segments as the paths it means; within
a segment ``*``, ``?`` and ``[…]`` are fnmatch's."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from vlaforge.data.errors import UserError, unknown

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def matches(path: str, pattern: str) -> bool:
    """Whether `path` has the pattern's number of segments, and each fits."""
    segments, wanted = path.split("."), pattern.split(".")
    return len(segments) == len(wanted) and all(map(fnmatchcase, segments, wanted))


def select(model: nn.Module, patterns: Sequence[str], skip: Sequence[str], flag: str, skip_flag: str) -> list[str]:
    """Paths of the modules that `patterns` mean and `skip` does not, in the model's order.

    Raises UserError for a pattern that matches nothing or only modules that are never called, for a `skip` that matches
    none of the selected, and for a module inside another selected one. The flags are named in its text.
    """
    if skip and not patterns:
        raise UserError(f"{skip_flag} is given without {flag}: it takes modules out of what that selects.")
    called = [name for name, module in model.named_modules() if name and not isinstance(module, NEVER_CALLED)]
    chosen = _matched(called, patterns, flag)
    out = set(_matched(chosen, skip, skip_flag))
    kept = [path for path in chosen if path not in out]
    whole = set(kept)
    for path in kept:
        parts = path.split(".")
        for end in range(1, len(parts)):
            if (outer := ".".join(parts[:end])) in whole:
                raise UserError(f"{flag} selects '{path}' and '{outer}' around it: choose one of the two.")
    return kept


def _matched(paths: Sequence[str], patterns: Sequence[str], flag: str) -> list[str]:
    found: set[str] = set()
    for pattern in patterns:
        if not all(pattern.split(".")):
            raise UserError(f"{flag} has the pattern '{pattern}' with an empty segment: write layers.*.mlp, say.")
        fitting = [path for path in paths if matches(path, pattern)]
        if not fitting:
            raise unknown(f"module in {flag}", pattern, {_numberless(path) for path in paths})
        found.update(fitting)
    return [path for path in paths if path in found]


def _numberless(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
