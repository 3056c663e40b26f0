"""What is in a dataset, as a page: cameras, actions and states over time, lengths, tasks.

charts.py  small charts      page.py  the HTML
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vlaforge.data.dataset import Dataset, Episode
from vlaforge.data.errors import UserError
from vlaforge.data.inspect import charts, page
from vlaforge.data.schema import ACTION, IMAGES, STATE, DataNeeds
from vlaforge.data.statistics import StatisticsSpec, compute

_EPISODES, _FRAMES, _POINTS, _CURVES = 6, 5, 100, 500


def summary(dataset: Dataset) -> list[tuple[str, str]]:
    """(name, value) of what a person asks first."""
    info = dataset.info
    lengths = [episode.length for episode in dataset.episodes]
    frames = sum(lengths)
    cameras = [f"{camera.name} {camera.height}x{camera.width} {camera.kind}" for camera in info.cameras.values()]
    rows = [
        ("path", str(info.path)),
        ("format", f"{info.format.removesuffix('_datasets')} {info.version}"),
        ("robot", info.robot_type or "not given"),
        ("episodes", f"{len(lengths)}, of {min(lengths)} to {max(lengths)} frames"),
        ("frames", f"{frames} at {info.fps:g} a second: {_duration(frames / info.fps)}"),
        ("cameras", ", ".join(cameras) or "none"),
        ("action", _vector(info.action_dim, info.action_names)),
        ("state", _vector(info.state_dim, info.state_names)),
    ]
    return rows + [("note", note) for note in dataset.notes]


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else f"{seconds / 60:.1f} min"
        if seconds < 3600
        else f"{seconds / 3600:.1f} h"
    )


def _vector(size: int, names: tuple[str, ...]) -> str:
    return f"{size} dimensions" + (f" ({', '.join(names)})" if names else "") if size else "none"


def write_page(dataset: Dataset, goal: Path) -> None:
    """Writes the page of `dataset` to the file `goal`. UserError when `goal` lies inside the dataset or is a folder."""
    inside, root = goal.expanduser().resolve(), dataset.info.path.resolve()
    if inside == root or (root.is_dir() and root in inside.parents):
        raise UserError(f"The page '{goal}' would lie inside the dataset: give --output a file elsewhere.")
    if goal.is_dir():
        raise UserError(f"The page '{goal}' is a folder: give --output a file.")
    text = page.document(f"{dataset.info.path.name}", _body(dataset))
    goal.parent.mkdir(parents=True, exist_ok=True)
    goal.write_text(text, encoding="utf-8")


def _body(dataset: Dataset) -> Iterator[str]:
    yield page.heading(dataset.info.path.name, 1)
    yield page.table((), summary(dataset))
    yield page.heading("Cameras")
    yield page.paragraph(f"{_FRAMES} frames from the first to the last, of up to {_EPISODES} episodes.", "mute")
    yield from _strips(dataset)
    yield page.heading("Tasks")
    counts = Counter(text for episode in dataset.episodes for text in (episode.tasks or ("",)))
    yield page.table(("task", "episodes"), [(text or "!(none)", count) for text, count in counts.most_common()])
    yield page.heading("Episode lengths")
    yield charts.bars("frames", [episode.length for episode in dataset.episodes], "frames")
    yield charts.bars("seconds", [episode.length / dataset.info.fps for episode in dataset.episodes], "s")
    statistics = compute(dataset, StatisticsSpec())
    for key, names in ((ACTION, dataset.info.action_names), (STATE, dataset.info.state_names)):
        if key in statistics:
            yield from _vectors(dataset, key, names, statistics[key])


def _strips(dataset: Dataset) -> Iterator[str]:
    for number in _spread(len(dataset.episodes), _EPISODES):
        episode = dataset.episodes[number]
        positions = _positions(dataset, number)
        if not positions:  # no row of it starts a sample
            continue
        samples = dataset.get_many(positions, DataNeeds())
        for name in dataset.info.cameras:
            caption = f"episode {episode.index} · {name} · {samples[0].get('task', '')}"
            yield page.strip(caption, [sample[IMAGES + name] for sample in samples])


def _positions(dataset: Dataset, number: int) -> list[int]:
    """Some positions of episode `number`."""
    start, end = [0, *dataset.ends][number : number + 2]
    return [start + at for at in _spread(end - start, _FRAMES)]


def _vectors(dataset: Dataset, key: str, names: tuple[str, ...], statistics: dict[str, np.ndarray]) -> Iterator[str]:
    yield page.heading(f"{'Action' if key == ACTION else 'State'} ({key})")
    yield page.paragraph("Over the time of an episode: all episodes (shaded), their median, and one of them.", "mute")
    size = len(statistics["min"])
    labels = [names[at] if len(names) == size else f"dimension {at}" for at in range(size)]
    low, middle, high, one, seconds = _curves(dataset, key)
    for at, label in enumerate(labels):
        yield charts.band(label, low[:, at], middle[:, at], high[:, at], one[:, at], seconds)
    columns = ("min", "q01", "mean", "q99", "max", "std")
    rows = []
    for at, label in enumerate(labels):
        constant = "!never changes" if statistics["min"][at] == statistics["max"][at] else ""
        rows.append([label, *(float(statistics[name][at]) for name in columns), constant])
    yield page.table(("dimension", *columns, ""), rows)


def _curves(dataset: Dataset, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """(low, median, high, one episode) [n, D] at evenly spaced times, and the time of the last in seconds."""
    chosen = [dataset.episodes[number] for number in _spread(len(dataset.episodes), _CURVES)]
    longest = max(episode.length for episode in chosen)
    frames = np.unique(np.linspace(0, longest - 1, min(_POINTS, longest)).round().astype(int))
    curves = np.stack([_curve(dataset, key, episode, frames) for episode in chosen])
    # Each time is in the longest episode at least, so no column is all NaN.
    low, middle, high = np.nanmin(curves, 0), np.nanmedian(curves, 0), np.nanmax(curves, 0)
    return low, middle, high, curves[len(chosen) // 2], (longest - 1) / dataset.info.fps


def _curve(dataset: Dataset, key: str, episode: Episode, frames: np.ndarray) -> np.ndarray:
    """[n, D] float64, NaN after the episode's end."""
    values = np.asarray(dataset.column(key, episode), np.float64).reshape(episode.length, -1)
    inside = values[np.minimum(frames, episode.length - 1)]
    return np.where((frames < episode.length)[:, None], inside, np.nan)


def _spread(total: int, count: int) -> list[int]:
    """Up to `count` of 0..total-1, evenly from the first to the last."""
    return sorted(set(np.linspace(0, total - 1, min(count, total)).round().astype(int).tolist())) if total else []
