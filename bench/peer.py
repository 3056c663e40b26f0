"""Another implementation's side of a training benchmark, in an interpreter of its own.

``bench/peers/<peer>_<family>.py`` runs there without this package. It is started with one argument, the path of a JSON
job, and answers lines on its standard input:

    job      {"config", "dtype", "threads", "weights", "batches", "lr", "weight_decay", "clip", "options"}
             weights: safetensors in the peer's own layout; batches: safetensors with our field and draw names
    "run N"  takes N training steps and answers {"seconds": [...], "losses": [...], "cpu": [...]}
    "about"  answers {"versions": ..., "conditions": ...}
    "profile PATH"  takes one step under torch's profiler and writes its table
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vlaforge.bench.sides import CLIP, LR, Case, Timed
from vlaforge.data.errors import UserError, unknown

LENT = ("diffusers",)
"""Pure Python packages that a peer may take from this interpreter where its own lacks them."""
PEERS = Path(__file__).parent / "peers"


def find_peer(peer: str, family: str) -> Path:
    """The peer's script for a family; UserError names those there are."""
    path = PEERS / f"{peer}_{family}.py"
    if not path.exists():
        there = [p.stem.removesuffix(f"_{family}") for p in PEERS.glob(f"*_{family}.py")]
        raise unknown(f"peer of {family}", peer, there)
    return path


def lend(python: str, folder: Path) -> dict[str, str]:
    """The environment of a process of `python`: with the packages of `LENT` that this interpreter has and that one
    lacks, linked into a new `folder`."""
    folder.mkdir()
    look = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    lacks = subprocess.run([python, "-c", look, *LENT], capture_output=True, text=True).stdout.split()
    for name in lacks:
        try:
            files = distribution(name)
        except PackageNotFoundError:
            continue
        home = Path(str(files.locate_file(name)))
        for found in (home, *home.parent.glob(f"{name}-*.dist-info")):
            (folder / found.name).symlink_to(found)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


class Peer:
    """A running peer. Use as a context manager.

    Args:
        python: its interpreter.
        state: our weights; they are handed over in the layout called `layout`.
        options: for the peer's script, said in its ``about``.
    """

    def __init__(
        self,
        name: str,
        python: str,
        case: Case,
        state: Mapping[str, Tensor],
        dtype: str,
        threads: int,
        layout: str = "lerobot",
        options: Mapping[str, Any] | None = None,
    ):
        script = find_peer(name.split()[0], case.family.name)
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="forge-peer-")
        folder = Path(self._folder.name)
        official = case.family.part("convert").LAYOUTS[layout].save(state)
        save_file({key: value.contiguous().clone() for key, value in official.items()}, folder / "weights.safetensors")
        batches = []
        for number, minibatch in enumerate(case.minibatches):
            fields = {**minibatch.batch, **{f"draw.{key}": value for key, value in minibatch.draw.items()}}
            batches.append(str(folder / f"batch{number}.safetensors"))
            save_file({key: value.contiguous() for key, value in fields.items()}, batches[-1])
        job = {
            "config": asdict(case.config), "dtype": dtype, "threads": threads, "batches": batches, "lr": LR,
            "weights": str(folder / "weights.safetensors"), "weight_decay": case.decay, "clip": CLIP,
            "valid": dict(case.valid), "options": dict(options or {}),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        self._log = (folder / "log.txt").open("w+")
        try:
            self._process = subprocess.Popen(
                [python, str(script), str(folder / "job.json")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env=lend(python, folder / "lent"),
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"The peer's interpreter '{python}' cannot be started: {error}.") from error

    def ask(self, line: str) -> Any:
        """The answer to one line; UserError with the end of the peer's log when it has died."""
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("{"):
                return json.loads(answer)
        self._log.seek(0)
        tail = self._log.read().strip().splitlines()[-8:]
        raise UserError(f"The peer '{self.name}' stopped: " + " / ".join(tail))

    def run(self, steps: int) -> Timed:
        answer = self.ask(f"run {steps}")
        return Timed(answer["seconds"], answer["losses"], answer.get("cpu", []))

    def about(self) -> dict[str, Any]:
        return self.ask("about")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
        self._folder.cleanup()
