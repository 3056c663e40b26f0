"""What a failing rank does to a job: all ranks end, the message names it, and what can be saved is saved."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from vlaforge.runtime.checkpoint.store import Checkpoints
from vlaforge.runtime.launch import FOLLOWED, cause

RANKS = 2
FLAGS = [
    "--model", "pi05", "--preset", "tiny", "--device", "cpu", "--num-workers", "0", "--train-iters", "100000",
    "--per-device-batch-size", "2", "--eval-episodes", "none", "--save-interval", "100000", "--no-save-rehearsal",
    "--distributed-strategy", "ddp", "--nproc", str(RANKS), "model.vision.depth=1", "model.language.depth=2",
    "model.expert.depth=2",
]  # fmt: skip
HANGS_S = 300
"""A job that has not begun or ended by then hangs: far above what it takes (10 to 60 s), on however busy a machine."""


def children(parent: int) -> list[int]:
    """Process ids whose parent is `parent`, as Linux lists them."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs (one that has ended and waits to be collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Job:
    """A running `forge-run --nproc`; `output` is what it printed."""

    def __init__(self, folder: Path, *flags: str):
        self.folder = folder
        command = [sys.executable, "-m", "vlaforge.runtime.commands.start", *FLAGS, "--output-dir", str(folder), *flags]
        self.pids: set[int] = set()
        self.log = folder.with_suffix(".log").open("w+")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=env, start_new_session=True)

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        wanted = f"\0RANK={number}\0".encode()
        for pid in children(self.process.pid):
            if wanted in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                self.pids.add(pid)
                return pid
        raise AssertionError(f"rank {number} is not running")

    def wait_for_steps(self, count: int = 2) -> None:
        """Until so many steps are logged."""
        rows = self.folder / "metrics.jsonl"
        self.wait_for(lambda: rows.is_file() and len(rows.read_text().splitlines()) >= count)
        self.pids.update(children(self.process.pid))

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Until `happened`, while the job runs."""
        deadline = time.monotonic() + HANGS_S
        while not happened():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, f"not in time\n{self.output}"
            time.sleep(0.1)

    def ended(self) -> int:
        """The exit code, once launcher and ranks are gone."""
        code = self.process.wait(timeout=HANGS_S)
        deadline = time.monotonic() + HANGS_S
        while time.monotonic() < deadline:
            if not any(alive(pid) for pid in self.pids):
                return code
            time.sleep(0.1)
        raise AssertionError(f"some process of the job is still there\n{self.output}")

    @property
    def output(self) -> str:
        self.log.flush()
        return Path(self.log.name).read_text()


@pytest.fixture
def job(tmp_path):
    running = []

    def start(*flags: str) -> Job:
        running.append(Job(tmp_path / "run", *flags))
        return running[-1]

    yield start
    for one in running:
        for pid in {one.process.pid, *one.pids}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        one.log.close()


@pytest.mark.parametrize(
    "ended, culprit",
    [
        ({0: (1, 0), 1: (-signal.SIGKILL, 0)}, 1),  # rank 0 noticed before the launcher looked
        ({0: (1, 0), 1: (-signal.SIGSEGV, 1)}, 1),  # the second turned in between
        ({0: (FOLLOWED, 0), 1: (FOLLOWED, 0), 2: (1, 0)}, 2),
        ({0: (FOLLOWED, 0), 1: (2, 1)}, 1),
        ({0: (1, 0), 1: (-signal.SIGKILL, 30)}, 0),  # rank 1 stalls, and the launcher had to kill it
        ({0: (-signal.SIGTERM, 0), 1: (1, 0)}, 1),  # the launcher ends what still runs
        ({0: (-signal.SIGTERM, 12), 1: (-signal.SIGTERM, 12), 2: (FOLLOWED, 0)}, 2),
    ],
)
def test_the_rank_that_caused_it(ended, culprit, tmp_path):
    failures = {}
    for rank, (code, after_s) in ended.items():
        failures[rank] = ProcessFailure(rank, 1000 + rank, code, str(tmp_path / "none"))
        failures[rank].timestamp = 1_700_000_000 + after_s
    assert cause(failures) == (culprit, failures[culprit])


def test_a_killed_rank_ends_the_job(job):
    running = job()
    running.wait_for_steps()
    os.kill(running.rank(1), signal.SIGKILL)
    assert running.ended() != 0
    assert "rank 1 was ended by signal 9" in running.output


def test_a_killed_launcher_leaves_a_checkpoint(job):
    running = job()
    running.wait_for_steps()
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.ended() == -signal.SIGKILL
    assert Checkpoints(running.folder / "checkpoints").newest() is not None


def test_sigterm_leaves_a_checkpoint(job):
    running = job()
    running.wait_for_steps()
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.ended() == 128 + signal.SIGTERM
    assert Checkpoints(running.folder / "checkpoints").newest() is not None
    assert "SIGTERM" in running.output


def test_a_rank_that_cannot_read_its_data(job, metaworld, tmp_path):
    """The second half of a video is zeros: some rank meets it, and its words are shown."""
    data = tmp_path / "data"
    shutil.copytree(metaworld, data)
    video = next(data.glob("videos/*scene*/**/*.mp4"))
    content = bytearray(video.read_bytes())
    content[len(content) // 2 : -20_000] = bytes(len(content) - len(content) // 2 - 20_000)
    video.write_bytes(content)
    running = job("--dataset-path", str(data), "--num-workers", "1")
    assert running.ended() not in (0, None)
    assert "rank" in running.output and video.name in running.output


def test_a_stalled_rank_is_named(job):
    running = job("--distributed-timeout-minutes", "0.3")
    running.wait_for_steps()
    pid = running.rank(1)
    os.kill(pid, signal.SIGSTOP)
    try:
        running.wait_for(lambda: "Rank 1 no longer answers" in running.output)
    finally:
        os.kill(pid, signal.SIGCONT)  # else the launcher would wait half a minute before it kills it
    assert running.ended() == 1
    assert "rank 0 failed with exit code 1" in running.output


def test_a_restarted_job_resumes_by_itself(job):
    running = job("--max-restarts", "1", "--save-interval", "2", "--train-iters", "40")
    running.wait_for(lambda: Checkpoints(running.folder / "checkpoints").newest() is not None)
    os.kill(running.rank(0), signal.SIGKILL)
    assert running.ended() == 0, running.output
    rows = [json.loads(line) for line in (running.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))
