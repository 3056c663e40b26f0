"""The real commands, run in this process as a person runs them; what a fault must look like to that person."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vlaforge.runtime.commands import data, run
from vlaforge.runtime.trainer import Trainer

SMALL = (
    "--model", "pi05", "--preset", "tiny", "model.vision.depth=1", "model.language.depth=1", "model.expert.depth=1",
    "--per-device-batch-size", "2", "--num-workers", "0", "--eval-episodes", "none", "--lr-warmup-iters", "1",
    "--train-iters", "2",
)  # fmt: skip
"""A π0.5 that trains two steps in under a second."""


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence of a fault that its user can mend: exit code 2, one line on stderr, no trace."""
        assert self.code == 2, (self.code, self.out[-2000:], self.err[-2000:])
        lines = self.err.strip().splitlines()
        assert len(lines) == 1 and "Traceback" not in self.out, self.err
        name, _, text = lines[0].partition(": ")
        assert name in ("forge-run", "forge-data") and text.endswith((".", "?")), lines[0]
        return text


@pytest.fixture
def forge(capsys, tmp_path, monkeypatch) -> Callable[..., Ended]:
    """``forge("--flag", ...)`` is ``forge-run`` with the small model, ``forge(..., tool="data")`` is ``forge-data``."""
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "cache"))

    def command(*argv: str, tool: str = "run", family: str = "pi05") -> Ended:
        capsys.readouterr()
        if tool == "run":
            folder = () if "--output-dir" in argv else ("--output-dir", str(tmp_path / "out"))
            model = SMALL if family == "pi05" else ("--model", family, "--preset", "tiny", "--num-workers", "0")
            code = run.main([*model, *folder, *argv])
        else:
            code = data.main(list(argv))
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return command


@pytest.fixture
def refused(forge, tmp_path, monkeypatch) -> Callable[..., str]:
    """The sentence with which ``forge-run`` refuses before it trains or writes anything."""

    def began(self) -> None:
        raise AssertionError("training began")

    monkeypatch.setattr(Trainer, "train", began)

    def sentence(*argv: str, **options: str) -> str:
        text = forge(*argv, **options).sentence
        assert not (tmp_path / "out").exists()
        return text

    return sentence


@pytest.fixture
def noted(forge) -> Callable[..., str]:
    """What ``forge-run --dry-run`` prints where it only warns."""

    def text(*argv: str) -> str:
        ended = forge("--dry-run", *argv)
        assert (ended.code, ended.err) == (0, ""), ended.err
        return ended.out

    return text


@pytest.fixture
def dataset(metaworld, tmp_path) -> Path:
    """A copy of the bundled dataset: its metadata may be changed, its rows and videos are links to replace."""
    copy = tmp_path / "dataset"
    shutil.copytree(metaworld, copy, copy_function=os.symlink)
    shutil.rmtree(copy / "meta")
    shutil.copytree(metaworld / "meta", copy / "meta")
    return copy


@pytest.fixture
def rewrite() -> Callable[[Path, Callable[[Any], Any]], None]:
    """Changes a JSON file: the change edits its content, or returns another."""

    def write(path: Path, change: Callable[[Any], Any]) -> None:
        content = json.loads(path.read_text())
        changed = change(content)
        path.write_text(json.dumps(content if changed is None else changed))

    return write


class Process:
    """The installed ``forge-run`` with the small model, as a process of its own."""

    def __init__(self, *argv: str, **options: Any):
        command = [str(Path(sys.executable).with_name("forge-run")), *SMALL, *argv]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        # Tests that a shell runs in the background ignore Ctrl-C, and their children would inherit that.
        listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {**pipes, "preexec_fn": listen, **options}
        self.process = subprocess.Popen(command, text=True, env=environment, **options)

    def ended(self, timeout: float = 600) -> Ended:
        """Waits for it; kills it where it hangs, and lets the test fail."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return Ended(self.process.returncode, out, err)


@pytest.fixture
def start() -> type[Process]:
    return Process


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run with checkpoints at step 1 and 2; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    assert run.main([*SMALL, "--output-dir", str(folder), "--save-interval", "1"]) == 0
    return folder


@pytest.fixture(scope="session")
def trained_dcp(tmp_path_factory) -> Path:
    """As `trained`, with the last checkpoint alone and in torch's own format."""
    folder = tmp_path_factory.mktemp("trained") / "dcp"
    assert run.main([*SMALL, "--output-dir", str(folder), "--save-format", "dcp"]) == 0
    return folder
