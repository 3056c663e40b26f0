"""Small charts as SVG text: no scripts, no fonts, readable in any browser."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

WIDTH, HEIGHT, MARGIN = 300, 110, 42


def band(title: str, low: np.ndarray, middle: np.ndarray, high: np.ndarray, one: np.ndarray, seconds: float) -> str:
    """A dimension over the time of an episode: all episodes between `low` and `high`, their median, and one of them.

    All are [n] over 0 .. `seconds`; NaN where no episode is that long.
    """
    values = np.concatenate([low, high])
    values = values[np.isfinite(values)]
    bottom, top = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if top - bottom < 1e-9:
        bottom, top = bottom - 0.5, top + 0.5

    def point(at: int, value: float, count: int) -> str:
        x = MARGIN + at / max(count - 1, 1) * (WIDTH - MARGIN - 4)
        y = 18 + (top - value) / (top - bottom) * (HEIGHT - 34)
        return f"{x:.1f},{y:.1f}"

    def points(line: np.ndarray) -> list[str]:
        return [point(at, value, len(line)) for at, value in enumerate(line.tolist()) if np.isfinite(value)]

    shade = " ".join(points(high) + points(low)[::-1])
    parts = [
        f'<polygon points="{shade}" class="band"/>',
        f'<polyline points="{" ".join(points(one))}" class="one"/>',
        f'<polyline points="{" ".join(points(middle))}" class="line"/>',
    ]
    axis = [
        f'<text x="{MARGIN - 3}" y="24" class="end">{top:.3g}</text>',
        f'<text x="{MARGIN - 3}" y="{HEIGHT - 16}" class="end">{bottom:.3g}</text>',
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 2}" class="end">{seconds:.3g} s</text>',
    ]
    return _svg(title, parts + axis)


def bars(title: str, values: Sequence[float], unit: str, count: int = 40) -> str:
    """A histogram of `values`."""
    heights, edges = np.histogram(np.asarray(values, np.float64), bins=min(count, max(len(set(values)), 1)))
    tallest = max(int(heights.max()), 1)
    width = (WIDTH - MARGIN - 4) / len(heights)
    parts = []
    for number, height in enumerate(heights.tolist()):
        tall = height / tallest * (HEIGHT - 38)
        x, y = MARGIN + number * width, HEIGHT - 16 - tall
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width * 0.9:.1f}" height="{tall:.1f}" class="bar"/>')
    parts += [
        f'<text x="{MARGIN - 3}" y="26" class="end">{tallest}</text>',
        f'<text x="{MARGIN}" y="{HEIGHT - 2}">{edges[0]:.4g}</text>',
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 2}" class="end">{edges[-1]:.4g} {escape(unit)}</text>',
    ]
    return _svg(title, parts)


def _svg(title: str, parts: list[str]) -> str:
    head = f'<text x="{MARGIN}" y="11" class="title">{escape(title)}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">{head}{"".join(parts)}</svg>'
