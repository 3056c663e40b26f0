"""`forge-data inspect` and `stats`."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import DataNeeds
from vlaforge.runtime.commands.data import main


class Page(HTMLParser):
    """Text and pictures of a page; every tag that is opened must be closed."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.pictures = [], [], []
        self.feed(text)
        assert self.open == ["html", "body"][: len(self.open)], self.open

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            source = dict(attributes)["src"]
            self.pictures.append(Image.open(BytesIO(base64.b64decode(source.partition("base64,")[2]))))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in ("rect", "polygon", "polyline")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_shows_cameras_curves_lengths_and_tasks(metaworld, tmp_path, capsys):
    goal = tmp_path / "page.html"
    assert main(["inspect", str(metaworld), "--output", str(goal)]) == 0
    page = Page(goal.read_text())
    text, printed = " ".join(page.text), capsys.readouterr().out
    for expected in ("scene 128x128 video", "6, of 58 to 91 frames", "gripper", "lerobot v3.0"):
        assert expected in text and expected in printed
    assert "open the drawer" in text
    assert len(page.pictures) == 6 * 2 * 5
    dataset = open_dataset(metaworld)
    shown = np.asarray(page.pictures[0]).astype(int)
    first = dataset.get(0, DataNeeds())
    assert np.abs(shown - first["observation.images.scene"]).mean() < 6  # JPEG
    assert len(re.findall("<svg", goal.read_text())) == 2 + 4 + 4
    assert not re.search(r"<script|https?://", goal.read_text())


@pytest.mark.parametrize("source", ["v21", "aloha", "agilex", "robomimic"])
def test_every_format_has_a_page(request, tmp_path, source):
    path = request.getfixturevalue(source)
    assert main(["inspect", str(path), "--output", str(tmp_path / "p.html"), "--split", "all"]) == 0
    assert Page((tmp_path / "p.html").read_text()).pictures


def test_hostile_names_are_escaped(tiny, tmp_path):
    root = tiny([3, 3], tasks=("<script>alert(1)</script>", "b & c"))
    assert main(["inspect", str(root), "--output", str(tmp_path / "p.html")]) == 0
    text = (tmp_path / "p.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text and "b &amp; c" in text


def test_stats_are_printed_and_written(v21, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "cache"))
    assert main(["stats", str(v21), "--output", str(tmp_path / "out/stats.json"), "--episodes", "0:2"]) == 0
    written = json.loads((tmp_path / "out/stats.json").read_text())
    dataset = open_dataset(v21, episodes=[0, 1])
    rows = np.concatenate([dataset.column("action", e) for e in dataset.episodes]).astype(np.float64)
    np.testing.assert_allclose(written["action"]["q99"], np.quantile(rows, 0.99, axis=0), rtol=1e-6)
    np.testing.assert_allclose(written["action"]["mean"], rows.mean(0), rtol=1e-9)
    assert "observation.state" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["stats", "inspect"])
def test_an_output_that_cannot_be_written_is_said(v21, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    assert main([command, str(v21), "--output", str(tmp_path / "file/there")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0 and "inspect" in capsys.readouterr().out
    assert main(["inspekt", "x"]) == 2
    assert "invalid choice: 'inspekt'" in capsys.readouterr().err
    assert main([]) == 2
