"""Faults of the user: one clear sentence, no stack trace, exit code 2.

`UserError` is raised wherever a value that a person gave cannot be used. The commands catch it, print its text, and
exit with 2. Its text says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


class UserError(Exception):
    """What the user gave cannot be used; `str(error)` is the one sentence to show."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` most similar names among `known`, best first; separators and case do not count.

    Only what may be meant: alike in three fifths of its letters (in order and out of order on average, so that swapped
    letters count little), and hardly less alike than the best one.
    """

    def fold(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "").replace(".", "")

    wanted, alike = SequenceMatcher(None, "", fold(name), autojunk=False), {}
    for candidate in known:
        wanted.set_seq1(fold(candidate))
        if wanted.quick_ratio() >= 0.6:  # never below `ratio`, and cheap
            alike[candidate] = (wanted.ratio() + wanted.quick_ratio()) / 2
    best = sorted(alike, key=lambda candidate: -alike[candidate])
    return [match for match in best[:count] if alike[match] >= max(0.6, alike[best[0]] - 0.1)]


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a mistyped name: says the nearest right ones, or all of them when none is near."""
    known = sorted(known)
    close = nearest(name, known)
    if close:
        return UserError(f"Unknown {kind} '{name}': did you mean {' or '.join(repr(c) for c in close)}?")
    listed = ", ".join(known) if known else "none"
    return UserError(f"Unknown {kind} '{name}': known are {listed}.")
