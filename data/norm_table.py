"""What normalisation does to each dimension, as a table at the start of a run, and when it stops the run.

A dimension is *near-constant* when it moves by less than a thousandth of its own size, or a hundredth of
what the other dimensions (median) move: then its scale is made of noise, and an ordinary value elsewhere
becomes a huge number that makes the loss explode. It is *extreme* when a value in the data normalises beyond
±100. Both stop a run unless it is allowed, and so does a dimension that varies in the data although its q01
and q99 are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.normalize import NEEDED, Normalizer

EXTREME = 100.0
OF_SIZE = 1e-3
OF_OTHERS = 1e-2


@dataclass(frozen=True)
class Row:
    """One dimension (of one step, where steps have their own statistics: the worst step is shown).

    `low`, `high`: what maps to -1 and 1 (for mean_std: mean ± std); `seen`: smallest and largest value of
    the data;
    `worst`: the largest |normalised value|; `outside`: share of rows outside [-1, 1], NaN when no rows were
    given.
    """

    key: str
    dim: int
    name: str
    low: float
    high: float
    seen: tuple[float, float]
    worst: float
    outside: float
    flag: str

    @property
    def stops(self) -> bool:
        return self.flag not in ("", "constant")


def table(
    key: str,
    normalizer: Normalizer,
    stats: Mapping[str, np.ndarray],
    rows: np.ndarray | None = None,
    names: Sequence[str] = (),
) -> list[Row]:
    """The rows of one key. `stats` are of the data that is trained on (``min``, ``max``), whatever
    statistics the normaliser was made of (those of a checkpoint, say); `rows` [N, D] or [N, H, D] give the
    share outside.
    """
    if not NEEDED[normalizer.mode]:
        return []
    low, high = _bounds(normalizer)
    seen_low, seen_high = (np.broadcast_to(np.asarray(stats[n], np.float64), low.shape) for n in ("min", "max"))
    ends = np.stack([seen_low, seen_high])
    worst = np.abs(normalizer.normalize(ends)).max(0)
    flags = _flags(normalizer, low, high, seen_low, seen_high, worst)
    outside = np.full(low.shape, np.nan)
    if rows is not None and len(rows):
        outside = (np.abs(normalizer.normalize(rows)) > 1 + 1e-6).mean(0)
    out = []
    for dim in range(low.shape[-1]):
        columns = [np.atleast_2d(a)[:, dim] for a in (low, high, seen_low, seen_high, worst, outside, flags)]
        step = int(np.argmax([(flag != "") * 1e12 + w for flag, w in zip(columns[6], columns[4])]))
        a, b, c, d, w, o, flag = (column[step] for column in columns)
        name = names[dim] if dim < len(names) else ""
        out.append(Row(key, dim, name, float(a), float(b), (float(c), float(d)), float(w), float(o), str(flag)))
    return out


def _bounds(n: Normalizer) -> tuple[np.ndarray, np.ndarray]:
    if n.mode == "mean_std":
        return n.a - n.b, n.a + n.b
    if n.mode == "scale":
        size = np.maximum(np.abs(n.a), np.abs(n.b))
        return -size, size
    return n.a, n.b


def _flags(n: Normalizer, low, high, seen_low, seen_high, worst) -> np.ndarray:
    constant, span = n.constant, high - low
    moving = span[~constant]
    typical = float(np.median(moving)) if moving.size else 0.0
    size = np.maximum(np.abs(low), np.abs(high))
    near = ~constant & ((span < OF_SIZE * size) | (span < OF_OTHERS * typical))
    spread = seen_high - seen_low
    hidden = constant & (spread > 1e-6 * np.maximum(np.abs(seen_low), np.abs(seen_high)))
    flags = np.where(constant, "constant", "").astype(object)
    flags[near] = "near-constant"
    flags[worst > EXTREME] = "extreme"
    flags[hidden] = "varies, but its bounds are equal"
    return flags


def text(rows: Iterable[Row]) -> str:
    """The table for a log; one line a dimension."""
    head = ("", "dim", "name", "low", "high", "seen", "outside", "max |z|", "")
    body = [
        (
            row.key,
            str(row.dim),
            row.name,
            f"{row.low:.5g}",
            f"{row.high:.5g}",
            f"{row.seen[0]:.5g} .. {row.seen[1]:.5g}",
            "" if np.isnan(row.outside) else f"{row.outside:.1%}",
            f"{row.worst:.3g}",
            row.flag,
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in [head, *body])


def check(rows: Iterable[Row], allow_extreme: bool = False) -> list[str]:
    """One sentence for each dimension that stops a run. UserError with the first, and the table, unless they are
    allowed."""
    rows = list(rows)
    problems = [_problem(row) for row in rows if row.stops]
    if problems and not allow_extreme:
        more = f" ({len(problems) - 1} more in the table)" if len(problems) > 1 else ""
        raise UserError(
            f"{problems[0]}{more}. Leave the dimension out, choose another normalisation, or train anyway with "
            f"--allow-extreme-norm.\n\n{text(rows)}"
        )
    return problems


def _problem(row: Row) -> str:
    named = f"'{row.name}' " if row.name else ""
    where = f"Normalisation of {row.key} dimension {row.dim} {named}is unsafe"
    if row.flag == "near-constant":
        return f"{where}: it hardly moves (from {row.low:.6g} to {row.high:.6g}), so its scale is made of noise"
    if row.flag == "extreme":
        return (
            f"{where}: values from {row.seen[0]:.6g} to {row.seen[1]:.6g} become as large as {row.worst:.3g} with "
            f"bounds {row.low:.6g} and {row.high:.6g}"
        )
    return (
        f"{where}: it varies from {row.seen[0]:.6g} to {row.seen[1]:.6g}, but both its bounds are {row.low:.6g}, so "
        f"it would be thrown away"
    )
