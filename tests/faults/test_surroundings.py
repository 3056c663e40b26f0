"""What surrounds a run: disks, terminals, folders, signals, other runs, the environment."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from vlaforge.runtime.config import Resolved
from vlaforge.runtime.process import locked


def tree(folder: Path) -> str:
    """A hash of all names and bytes below `folder`."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return total.hexdigest()


def test_nothing_is_written_into_a_dataset(forge, dataset):
    """Every command that takes a dataset, asked to write into it, or failing on it: its bytes stay."""
    before, inside = tree(dataset), str(dataset / "out")
    run = ("--dataset-path", str(dataset), "--output-dir", inside)
    assert "lies inside the dataset" in forge(*run).sentence
    assert "lies inside the dataset" in forge(*run, "--dry-run").sentence
    for words in (
        ("inspect", str(dataset), "--output", f"{inside}.html"),
        ("stats", str(dataset), "--output", f"{inside}.json"),
        ("convert", str(dataset), inside),
        ("convert", str(dataset), str(dataset)),
        ("stats", str(dataset), "--episodes", "99"),
        ("stats", str(dataset), "--action-key", "nothing"),
        ("check", str(dataset), "--lerobotdataset-version", "v2.1"),
    ):
        assert forge(*words, tool="data").code in (1, 2), words
    assert tree(dataset) == before


def test_another_run_writes_there(forge, tmp_path):
    """The second run of a folder stops, and moves or changes nothing of the first."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("of the first\n")
    with locked(folder):
        said = forge().sentence
    assert said.startswith("Another run is writing to") and "--output-dir" in said
    assert (folder / "metrics.jsonl").read_text() == "of the first\n"
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "metrics.jsonl"]


def test_a_full_disk_at_the_start(forge, monkeypatch):
    def full(self, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Resolved, "save", full)
    said = forge().sentence
    assert "config.yaml" in said and "No space left on device" in said and "make room" in said


class Full(io.StringIO):
    """A stream on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("flag", ["--help", "--dry-run", "--print-config"])
def test_standard_output_that_takes_nothing(forge, monkeypatch, flag):
    monkeypatch.setattr(sys, "stdout", Full())
    assert "No space left on device" in forge(flag).sentence


def test_no_standard_output_at_all(forge, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert forge("--dry-run").code == 0


@pytest.mark.parametrize("ranks", ["abc", "0", "-1", ""])
def test_a_count_of_ranks_that_is_none(refused, monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert f"WORLD_SIZE is '{ranks}': it must be the number of ranks." in refused("--loss-log-rank", "0")


def test_without_a_network(refused, monkeypatch):
    """A dataset that is not here: the sentence says so, whether the hub may be asked or not."""
    assert "is not a local folder" in refused("--dataset-path", "lerobot/pusht")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "Without a network, copy it" in refused("--dataset-path", "lerobot/pusht")
    assert "'lerobot pusht' does not exist" in refused("--dataset-path", "lerobot pusht")


def test_a_real_run_in_a_hostile_place(start, dataset, tmp_path):
    """Spaces and letters in paths, standard input closed, an ASCII locale and terminal, streaming from two workers."""
    place = tmp_path / "ün dossier"
    place.mkdir()
    moved = dataset.rename(place / "données №1")
    ended = start(
        "--dataset-path", str(moved), "--output-dir", str(place / "sortie ö"), "--streaming", "--num-workers", "2",
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}, stdin=None, preexec_fn=lambda: os.close(0),
    ).ended()  # fmt: skip
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert (place / "sortie ö/checkpoints/last").exists() and "Done in" in ended.out
    assert "données" in (place / "sortie ö/log.txt").read_text(encoding="utf-8")


def test_an_interrupt_during_the_checks(start, tmp_path):
    """Ctrl-C before the first step: one word, the usual exit code, no trace."""
    for attempt in range(5):  # on a busy machine two steps may be over before the signal is sent
        process = start("--output-dir", str(tmp_path / f"out{attempt}"), env={"PYTHONUNBUFFERED": "1"})
        assert process.process.stdout.readline().startswith("output folder")
        process.process.send_signal(signal.SIGINT)
        ended = process.ended()
        if "Done in" not in ended.out:
            break
    assert ended.code == 130 and "Traceback" not in ended.err
