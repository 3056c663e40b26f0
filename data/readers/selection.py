"""Which episodes of a dataset are visited, and in what order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from vlaforge.data.errors import UserError, unknown

MOST = 10_000_000
"""Episodes; a number beyond it is a slip of the finger, and its range would fill the memory."""
_RANGE = re.compile(r"(?P<first>\d+)(\s*(?P<sign>[:-])\s*(?P<last>\d+))?")


def select(
    known: Sequence[int], episodes: Sequence[int] | str | None, split: str, splits: Mapping[str, str]
) -> list[int]:
    """Episode numbers to visit, in order.

    Args:
        known: the dataset's episode numbers, in its own order.
        episodes: numbers, or text such as ``"0:10,15"`` (a range leaves its end out); None takes the split.
        split: a name of `splits`, or ``all``. A dataset without splits has only ``train`` (and ``all``).
        splits: of info.json, name → ``"first:end"``.

    Raises UserError for an unknown split, and for an episode that is not there or is named twice.
    """
    if episodes is not None:
        chosen = parse_ranges(episodes) if isinstance(episodes, str) else [int(number) for number in episodes]
        _check(chosen, known)
        return chosen
    if split == "all" or (split == "train" and not splits):
        return list(known)
    if split not in splits:
        raise unknown("split", split, [*splits, "all"])
    wanted = set(parse_ranges(splits[split]))
    chosen = [number for number in known if number in wanted]
    if not chosen:
        raise UserError(f"Split '{split}' ({splits[split]}) holds none of the dataset's {len(known)} episodes.")
    return chosen


def parse_ranges(text: str) -> list[int]:
    """``"0:3,7,9-10"`` → [0, 1, 2, 7, 9, 10]: a colon leaves the end out, a dash has it in. UserError when it cannot be
    read, or a range is empty."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise UserError(
                f"Episodes '{text}' cannot be read: give numbers and ranges, such as 0-9,15 (or 0:10, without 10)."
            )
        first, sign, last = match["first"], match["sign"], match["last"]
        end = int(last or first) + (sign != ":")
        if end <= int(first):
            raise UserError(f"Episodes '{text}': the range {part.strip()} is empty, give the smaller number first.")
        if end > MOST:
            raise UserError(f"Episodes '{text}': {part.strip()} is larger than any dataset's number, {MOST}, can be.")
        numbers += range(int(first), end)
    return numbers


def _check(chosen: list[int], known: Iterable[int]) -> None:
    missing = sorted(set(chosen) - set(known))
    if missing:
        known = list(known)
        raise UserError(
            f"The dataset has no episode {_listed(missing)}; it has {len(known)}, "
            f"numbered {min(known)} to {max(known)}."
        )
    if len(set(chosen)) != len(chosen):
        twice = sorted({number for number in chosen if chosen.count(number) > 1})
        raise UserError(f"Episode {_listed(twice)} is named twice.")
    if not chosen:
        raise UserError("No episode is chosen: give at least one.")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
