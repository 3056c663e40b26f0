"""Moments and quantiles that merge without regard to order.

The quantile sketch counts float32 values by the bits of their order.

The bits of a float32, as a signed integer with negative values mirrored, sort as the floats do. The sketch
counts values by this key, shifted right by the smallest number of bits that leaves at most `capacity`
distinct keys in any column. Whatever the order or partition of the input, the result is a function of the
values alone.

Error: none while no column has more than `capacity` distinct values (``exact``). After that, a quantile lies
in the right bucket of 2^shift neighbouring floats: relative to the value itself the bucket is at most
2^(shift - 23) wide, and ranks are interpolated inside it. A narrow range (1.5686 .. 1.5696) has few floats,
so it stays exact for longer.
"""

from __future__ import annotations

import numpy as np

from vlaforge.data.errors import UserError

KEPT = 1 << 23
"""Distinct values kept by all sketches of a key together (12 bytes each)."""


def _keys(values: np.ndarray) -> np.ndarray:
    """float32 → int64 in the same order (-0.0 counts as 0.0)."""
    bits = (np.asarray(values, np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _floats(keys: np.ndarray) -> np.ndarray:
    """The inverse of `_keys`; keys beyond the largest float give it."""
    size = np.minimum(np.abs(keys), 0x7F7FFFFF).astype(np.int32).view(np.float32).astype(np.float64)
    return np.where(keys < 0, -size, size)


class Sketch:
    """Counts of one column's values. `capacity`: distinct keys kept."""

    def __init__(self, capacity: int = 1 << 16):
        self.capacity = capacity
        self.shift = 0
        self.keys = np.zeros(0, np.int64)
        self.counts = np.zeros(0, np.int64)

    @property
    def exact(self) -> bool:
        return self.shift == 0

    def add(self, values: np.ndarray) -> None:
        """Finite values [N]."""
        keys, counts = np.unique(_keys(values) >> self.shift, return_counts=True)
        self._join(keys, counts.astype(np.int64))

    def merge(self, other: Sketch) -> None:
        if other.shift > self.shift:
            self._coarsen(other.shift)
        self._join(other.keys >> (self.shift - other.shift), other.counts)

    def _join(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self.keys, self.counts = _grouped(
            np.concatenate([self.keys, keys]), np.concatenate([self.counts, counts])
        )
        while len(self.keys) > self.capacity:
            self._coarsen(self.shift + 1)

    def _coarsen(self, shift: int) -> None:
        self.keys, self.counts = _grouped(self.keys >> (shift - self.shift), self.counts)
        self.shift = shift

    def quantile(self, q: float) -> float:
        """Between the two neighbouring ranks linearly, as numpy's default; NaN when empty."""
        total = int(self.counts.sum())
        if not total:
            return float("nan")
        rank = q * (total - 1)
        low = self._at(int(np.floor(rank)))
        return low + (self._at(int(np.ceil(rank))) - low) * (rank - np.floor(rank))

    def _at(self, rank: int) -> float:
        """The value of `rank` (0-based); inside a bucket of several floats, by its share of the bucket's
        count.
        """
        ends = np.cumsum(self.counts)
        bucket = int(np.searchsorted(ends, rank, side="right"))
        first = self.keys[bucket] << self.shift
        if self.exact:
            return float(_floats(first))
        last = first + (1 << self.shift) - 1
        low, high = (float(_floats(np.asarray(key))) for key in (first, last))
        share = (rank - (ends[bucket] - self.counts[bucket]) + 0.5) / self.counts[bucket]
        return low + (high - low) * share


def _grouped(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums the counts of equal keys."""
    unique, where = np.unique(keys, return_inverse=True)
    return unique, np.bincount(where, weights=counts, minlength=len(unique)).astype(np.int64)


class Accumulator:
    """Streams rows of one shape [A] or [H, A]; merges with another of the same shape in any order."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        columns = int(np.prod(shape))
        self.count = np.zeros(columns)
        self.mean, self.square = np.zeros(columns), np.zeros(columns)
        self.min, self.max = np.full(columns, np.inf), np.full(columns, -np.inf)
        capacity = int(np.clip(KEPT // max(columns, 1), 1 << 12, 1 << 17))
        self.sketches = [Sketch(capacity) for _ in range(columns)]

    def add(self, rows: np.ndarray, valid: np.ndarray | None = None) -> None:
        """rows [N, *shape]; `valid` bool [N, H] leaves out steps that do not exist (chunks past an episode's
        end).
        """
        flat = np.asarray(rows, np.float64).reshape(len(rows), -1)
        used = None
        if valid is not None:
            used = np.broadcast_to(valid[..., None], rows.shape).reshape(len(rows), -1)
        for column, sketch in enumerate(self.sketches):
            x = flat[:, column] if used is None else flat[used[:, column], column]
            if len(x):
                sketch.add(x)
                self._moments(column, len(x), x.mean(), ((x - x.mean()) ** 2).sum(), x.min(), x.max())

    def merge(self, other: Accumulator) -> None:
        if other.shape != self.shape:
            raise UserError(f"Statistics of shapes {self.shape} and {other.shape} cannot be merged.")
        for column, sketch in enumerate(self.sketches):
            sketch.merge(other.sketches[column])
            parts = (getattr(other, name)[column] for name in ("count", "mean", "square", "min", "max"))
            self._moments(column, *parts)

    def _moments(self, c: int, count: float, mean: float, square: float, low: float, high: float) -> None:
        """Adds a group to column `c` (Chan's update of the mean and the squared deviations)."""
        if not count:
            return
        total = self.count[c] + count
        shift = mean - self.mean[c]
        self.square[c] += square + shift * shift * self.count[c] * count / total
        self.mean[c] += shift * count / total
        self.count[c], self.min[c], self.max[c] = total, min(self.min[c], low), max(self.max[c], high)

    @property
    def exact(self) -> bool:
        """Whether the quantiles are exact (see `sketch`)."""
        return all(sketch.exact for sketch in self.sketches)

    def result(self) -> dict[str, np.ndarray]:
        """mean, std (population), min, max, q01, q99, count: float64 [*shape]. UserError for a column
        without rows.
        """
        if not self.count.all():
            raise UserError(
                "There are no rows to take statistics of; is an episode shorter than the horizon needs?"
            )
        values = {
            "mean": self.mean,
            "std": np.sqrt(self.square / self.count),
            "min": self.min,
            "max": self.max,
            "q01": np.array([s.quantile(0.01) for s in self.sketches]),
            "q99": np.array([s.quantile(0.99) for s in self.sketches]),
            "count": self.count,
        }
        return {name: value.reshape(self.shape) for name, value in values.items()}
