"""Console lines, loss curve, page: what a person gets to see."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from PIL import Image

from vlaforge.runtime.console import Console, duration
from vlaforge.runtime.report import column, finish, first_and_last, read_metrics, run_facts, smooth


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, **more) -> dict:
    return {"step": step, "loss": 2.0 / step, "lr": 1e-3, "samples_per_s": 20.0, "data_wait": 0.25, **more}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (185, "3:05 min"), (7620, "2:07 h"), (273_600, "3 d 4 h"), (math.inf, "?")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_plain_lines_in_a_pipe(tmp_path):
    stream = io.StringIO()
    console = Console(stream)
    console.log = tmp_path / "log.txt"
    with console.progress(total=50) as progress:
        for step in range(1, 51):
            progress.update(step, row(step, grad_norm=1.5, skipped=2 if step == 50 else 0))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step  1/50 · loss 2.0000 · lr 1.00e-03 · grad 1.5 · 20 samples/s · data wait 25 %")
    assert lines[-1].startswith("step 50/50 · loss 0.0400") and "2 skipped" in lines[-1]
    assert len(lines) < 10, "fast steps must not flood a log"
    assert (tmp_path / "log.txt").read_text() == stream.getvalue()


def test_one_live_line_in_a_terminal():
    stream = Terminal()
    console = Console(stream)
    with console.progress(total=3) as progress:
        progress.update(1, row(1))
        console.say("Checkpoint written")
        progress.update(3, row(3))
    shown = stream.getvalue()
    assert "Checkpoint written" in shown and "step 3/3" in shown and "\x1b[" in shown


def test_other_ranks_are_quiet():
    stream = io.StringIO()
    console = Console(stream, quiet=True)
    with console.progress(total=3) as progress:
        progress.update(1, row(1))
        console.say("hello")
    assert stream.getvalue() == ""


def test_time_left_leaves_out_the_first_step():
    progress = Console(io.StringIO()).progress(total=100)
    progress._steady = (1, 60.0)
    assert progress.left(1, 60.0) is None
    assert progress.left(11, 70.0) == pytest.approx(89.0)


def test_metrics_survive_a_line_cut_off_by_a_crash(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2, loss=None)) + "\n" + '{"step": 3, "lo')
    rows = read_metrics(path)
    assert [r["step"] for r in rows] == [1, 2]
    steps, values = column(rows, "loss")
    assert steps.tolist() == [1.0] and values.tolist() == [2.0]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_running_mean_is_centred_and_keeps_a_line():
    values = np.arange(20.0)
    assert np.allclose(smooth(values, 5)[2:-2], values[2:-2])
    assert smooth(values, 5)[0] == 1.0
    assert first_and_last([4.0] * 5 + [1.0] * 95) == (4.0, 1.0)


def test_pictures_and_page(tmp_path):
    rows = [row(step) for step in range(1, 60)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = finish(tmp_path, "pi05 <tiny>", rows, None, run_facts(rows, 75.0), {"Plan": "1 on fuse & pack"})
    assert "Loss: 1.2222 at the start" in said and str(tmp_path / "loss.png") in said
    for name in ("loss.png", "speed.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300 and len(set(picture.convert("L").resize((40, 30)).tobytes())) > 5
    page = (tmp_path / "report.html").read_text()
    assert "pi05 &lt;tiny&gt;" in page and "fuse &amp; pack" in page and page.count("data:image/png;base64,") == 2
    assert "1:15 min" in page and "25 %" in page and "http" not in page.replace("http-equiv", "")
