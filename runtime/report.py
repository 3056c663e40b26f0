"""What a run leaves for people to look at: loss curve, open-loop picture, and a page with all of it.

Pictures are drawn without a display. `report.html` is one file: its pictures are inside it.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from vlaforge.runtime.console import duration
from vlaforge.runtime.openloop import Prediction, table

INK, FAINT, GOOD, BAD = "#1f2430", "#9aa3b2", "#1f77b4", "#d08770"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl; a last line cut off by a crash is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def column(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one metric where it is a finite number."""
    pairs = [
        (row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
    ]
    steps, values = zip(*pairs) if pairs else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean; the window shrinks at the ends."""
    if window < 2 or len(values) < 3:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    half, at = window // 2, np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Mean loss at the start and at the end: a twentieth of the rows each, 3 to 50 of them where there are as many."""
    rows = max(min(max(len(values) // 20, 3), 50, len(values) // 3), 1)
    return float(np.mean(values[:rows])), float(np.mean(values[-rows:]))


# --------------------------------------------------------------------------------------------- pictures


def _axes(figure: Figure, *place: int):
    axes = figure.add_subplot(*place)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(alpha=0.25)
    return axes


def loss_curve(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """loss.png: the loss of each logged step and its running mean, learning rate below."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[3, 1])
    top, bottom = _axes(figure, grid[0]), _axes(figure, grid[1])
    steps, loss = column(rows, "loss")
    top.plot(steps, loss, color=FAINT, linewidth=0.8, label="each step")
    top.plot(steps, smooth(loss, max(len(loss) // 25, 5)), color=GOOD, linewidth=1.8, label="running mean")
    if len(loss) and loss.min() > 0 and loss.max() / loss.min() > 20:
        top.set_yscale("log")
        top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        top.yaxis.set_major_formatter("{x:g}")
        top.yaxis.set_minor_formatter(NullFormatter())
    top.set_ylabel("loss", fontsize=9)
    top.set_title(title, fontsize=10, color=INK, loc="left")
    top.legend(frameon=False, fontsize=8)
    held_steps, held = column(rows, "eval_loss")
    if len(held):
        top.plot(held_steps, held, "o-", color=BAD, markersize=3, linewidth=1, label="held out")
        top.legend(frameon=False, fontsize=8)
    bottom.plot(*column(rows, "lr"), color=INK, linewidth=1.2)
    bottom.set_ylabel("learning rate", fontsize=9)
    bottom.set_xlabel("optimiser step", fontsize=9)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figure.savefig(path, dpi=130)


def openloop_picture(
    before: Prediction | None, after: Prediction, names: Sequence[str], result: Mapping[str, Any], path: Path
) -> None:
    """openloop.png: recorded and predicted actions over one held-out episode, a row for each dimension."""
    episode = after.places[0][0]
    chosen = [number for number, (which, _) in enumerate(after.places) if which == episode]
    figure = Figure(figsize=(8.4, 1.0 + 1.5 * len(names)), layout="constrained")
    for dim, name in enumerate(names):
        axes = _axes(figure, len(names), 1, dim + 1)
        for number in chosen:
            valid = after.valid_NH[number]
            x = after.places[number][1] + np.arange(len(valid))[valid]
            lines = [
                ("recorded", after.recorded_NHA, INK, 1.6),
                ("predicted, after training", after.predicted_NHA, GOOD, 1.4),
            ]
            if before is not None:
                lines.insert(1, ("predicted, before training", before.predicted_NHA, BAD, 0.8))
            for label, values_NHA, colour, width in lines:
                seen = number != chosen[0]
                y = values_NHA[number, valid, dim]
                axes.plot(x, y, color=colour, linewidth=width, label=None if seen else label)
            axes.axvline(after.places[number][1], color=FAINT, linewidth=0.4, alpha=0.5)
        axes.set_ylabel(name, fontsize=9)
        if dim == 0:
            axes.set_title(_errors(episode, result), fontsize=10, color=INK, loc="left")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=3, loc="outside lower left")
    axes.set_xlabel("frame (thin lines: the model sees the camera and predicts the next chunk)", fontsize=9)
    figure.savefig(path, dpi=130)


def _errors(episode: int, result: Mapping[str, Any]) -> str:
    words = [f"mean absolute error {result['trained']['error']:.3f}"]
    if "untrained" in result:
        words.append(f"untrained {result['untrained']['error']:.3f}")
    words.append(f"repeating the mean action {result['mean_action']['error']:.3f}")
    return f"held-out episode {episode}: {', '.join(words)}"


# ------------------------------------------------------------------------------------------------- page

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;color:#1f2430;max-width:60rem;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.5rem}} h2{{font-size:1.1rem;margin-top:2rem}} img{{max-width:100%}}
table{{border-collapse:collapse}} td,th{{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}}
td.n{{text-align:right;font-variant-numeric:tabular-nums}}
pre{{background:#f4f5f8;padding:.8rem;overflow-x:auto;font-size:12.5px}}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def write_page(folder: Path, title: str, facts: Mapping[str, str], texts: Mapping[str, str]) -> Path:
    """report.html: `facts` as a table, the pictures of the folder, and `texts` (heading → plain text)."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    parts = [f"<table>{rows}</table>"]
    for name, heading in (("loss.png", "Loss"), ("speed.png", "Speed"), ("openloop.png", "Open loop")):
        if (folder / name).exists():
            data = base64.b64encode((folder / name).read_bytes()).decode()
            parts.append(f'<h2>{heading}</h2><img alt="{heading}" src="data:image/png;base64,{data}">')
    parts += [f"<h2>{html.escape(head)}</h2><pre>{html.escape(text)}</pre>" for head, text in texts.items() if text]
    path = folder / "report.html"
    path.write_text(_PAGE.format(title=html.escape(title), body="".join(parts)), encoding="utf-8")
    return path


def speed_picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """speed.png: samples/s and the share of each step that waited for data, in per cent."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    for place, (name, label, scale) in enumerate(
        (("samples_per_s", "samples/s", 1.0), ("data_wait", "data wait, %", 100.0)), start=1
    ):
        axes = _axes(figure, 2, 1, place)
        steps, values = column(rows, name)
        axes.plot(steps, values * scale, color=GOOD if place == 1 else BAD, linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label, fontsize=9)
    axes.set_xlabel("optimiser step", fontsize=9)
    figure.savefig(path, dpi=130)


def openloop_words(result: Mapping[str, Any]) -> str:
    """The open-loop table with what it means in a line."""
    lines = [f"Open loop on held-out episode {', '.join(map(str, result['episodes']))}: {result['what']}", ""]
    lines += [f"  {line}" for line in table(result)]
    lines.append("")
    parts = [f"{result['trained_over_mean_action']:.2f} of repeating the mean action"]
    if "trained_over_untrained" in result:
        parts.insert(0, f"{result['trained_over_untrained']:.2f} of the untrained model's")
    lines.append(f"  The trained model's error is {' and '.join(parts)}.")
    return "\n".join(lines)


def finish(
    folder: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
    facts: Mapping[str, str],
    texts: Mapping[str, str],
) -> str:
    """Draws the pictures, writes report.html, and returns the last words of a run.

    Args:
        folder: of the run; `openloop_picture` has drawn into it already.
        rows: of metrics.jsonl.
        result: of the open-loop check, or None.
        facts, texts: for the page.
    """
    words = []
    if rows:
        loss_curve(rows, title, folder / "loss.png")
        speed_picture(rows, folder / "speed.png")
        start, end = first_and_last(column(rows, "loss")[1])
        words.append(f"Loss: {start:.4f} at the start, {end:.4f} at the end ({end / start:.0%}).")
        facts = {"loss": f"{start:.4f} at the start, {end:.4f} at the end", **facts}
    opened = openloop_words(result) if result is not None else ""
    if opened:
        words += ["", opened]
    write_page(folder, title, facts, {"Open loop in numbers": opened, **texts})
    names = {
        "loss.png": "loss curve", "openloop.png": "open-loop picture", "openloop.json": "open-loop numbers",
        "report.html": "run page", "metrics.jsonl": "metrics", "config.yaml": "configuration", "plan.txt": "plan",
        "log.txt": "log",
    }  # fmt: skip
    words.append("")
    words += [f"{label:<18} {folder / name}" for name, label in names.items() if (folder / name).exists()]
    return "\n".join(words)


def run_facts(rows: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, str]:
    """What a run took: steps, time, and the median speed after its first tenth."""
    facts = {"steps": str(rows[-1]["step"]) if rows else "0", "time": duration(seconds)}
    for name, label, scale, unit in (("samples_per_s", "samples/s", 1, ""), ("data_wait", "data wait", 100, " %")):
        values = column(rows, name)[1]
        if len(values):
            facts[f"median {label}"] = f"{np.median(values[len(values) // 10 :]) * scale:.3g}{unit}"
    return facts
