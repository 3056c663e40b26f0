"""Faults of the user: one clear sentence, no stack trace, exit code 2.

`UserError` is raised wherever a value that a person gave cannot be used. The commands catch it, print its text, and
exit with 2. Its text says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """What the user gave cannot be used; `str(error)` is the one sentence to show."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` most similar names among `known`, best first; separators and case do not count."""

    def fold(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "").replace(".", "")

    by_fold: dict[str, str] = {}
    for candidate in known:
        by_fold.setdefault(fold(candidate), candidate)
    return [by_fold[match] for match in get_close_matches(fold(name), by_fold, n=count, cutoff=0.5)]


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a mistyped name: says the nearest right ones, or all of them when none is near."""
    known = sorted(known)
    close = nearest(name, known)
    if close:
        return UserError(f"Unknown {kind} '{name}': did you mean {' or '.join(repr(c) for c in close)}?")
    listed = ", ".join(known) if known else "none"
    return UserError(f"Unknown {kind} '{name}': known are {listed}.")
