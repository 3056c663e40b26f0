"""Statistics to store with a dataset: of columns by row, of cameras by channel, for each episode and for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)


def of_rows(values: np.ndarray) -> dict[str, np.ndarray]:
    """min, max, mean, std, true quantiles [D] and count [1] of rows [T] or [T, D]."""
    rows = values.reshape(len(values), -1).astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found["count"] = np.array([len(rows)])
    found |= {_name(q): np.quantile(rows, q, axis=0) for q in QUANTILES}
    return found


class Pixels:
    """Counts of pixel values by channel, so that statistics of any union of pictures are exact."""

    def __init__(self) -> None:
        self.counts = np.zeros((3, 256), np.int64)
        self.pictures = 0

    def add(self, pictures: np.ndarray) -> None:
        """uint8 [n, H, W, 3]."""
        for channel in range(3):
            self.counts[channel] += np.bincount(pictures[..., channel].reshape(-1), minlength=256)
        self.pictures += len(pictures)

    def merge(self, other: Pixels) -> None:
        self.counts += other.counts
        self.pictures += other.pictures

    def result(self) -> dict[str, np.ndarray]:
        """As LeRobot stores them: [3, 1, 1], values of 0 to 255 as 0 to 1; count [1] is the number of pictures."""
        values = np.arange(256) / 255
        total = self.counts.sum(1, keepdims=True)
        cumulative = np.cumsum(self.counts, axis=1)
        mean = self.counts @ values / total[:, 0]
        square = self.counts @ values**2 / total[:, 0]

        def rank(share: float) -> np.ndarray:
            return values[(cumulative < np.ceil(np.maximum(share * total, 1))).sum(1)]

        found = {"min": rank(0.0), "max": rank(1.0), "mean": mean, "std": np.sqrt(np.maximum(square - mean**2, 0))}
        found |= {_name(q): rank(q) for q in QUANTILES}
        return {name: value.reshape(3, 1, 1) for name, value in found.items()} | {"count": np.array([self.pictures])}


def sampled(length: int, count: int = 16) -> list[int]:
    """Up to `count` frames of an episode, evenly spread from the first to the last."""
    return sorted(set(np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()))


def plain(statistics: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, Any]]:
    """As lists and numbers, for JSON and parquet."""
    return {key: {name: value.tolist() for name, value in entry.items()} for key, entry in statistics.items()}


def pooled(parts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """`of_rows` over all of `parts` together."""
    return of_rows(np.concatenate([part.reshape(len(part), -1) for part in parts]))


def _name(quantile: float) -> str:
    return f"q{round(quantile * 100):02d}"
