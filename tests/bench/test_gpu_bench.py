"""The script for a GPU machine, as far as it can be followed without one: order, records, faults and time limits."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlaforge.bench import gpu, gpu_steps, kernels
from vlaforge.bench.cli import main
from vlaforge.bench.gpu_steps import LOST, ORDER, Table, Variant, ladder, variants
from vlaforge.bench.sides import Timed, full_case
from vlaforge.graphs import make_plan


class Stub:
    """A side that takes a tenth of a second a sample, or fails."""

    def __init__(self, case, fault: str = ""):
        self.batch, self.fault = case.batch_size, fault

    def run(self, steps: int) -> Timed:
        if self.fault:
            raise RuntimeError(f"{self.fault}\nand its trace")
        return Timed([0.1 * self.batch] * steps, [1.0] * steps)


@pytest.fixture
def stubs(monkeypatch):
    """Four variants on the tiny model; the second one fails."""
    faults = {"bad": "illegal memory access", "whole plan": "out of memory"}
    names = ("official recipe", 2), ("bad", 2), (f"+ {ORDER[-1]}", 2), ("whole plan", 4), ("whole plan", 8)
    made = [Variant(n, size, lambda case, n=n: Stub(case, faults.get(n, "")), None) for n, size in names]
    monkeypatch.setattr(gpu_steps, "variants", lambda *_: made)


def run(record: Path, *more: str) -> int:
    return main(["gpu_steps", "--preset", "tiny", "--batch-size", "2", "--steps", "2", "--record", str(record), *more])


def rows(record: Path) -> dict[str, dict]:
    return {f"{row['name']} @ {row['batch']}": row for row in json.loads(record.read_text())["rows"]}


def test_each_rung_adds_one_pass_and_the_last_has_them_all():
    rungs = ladder()
    assert [name for name, _ in rungs] == ["eager", *(f"+ {name}" for name in ORDER)]
    counts = [len(options.without) for _, options in rungs]
    assert counts == sorted(counts, reverse=True)
    case = full_case("pi05", 2, 2, 50, preset="tiny")
    with torch.device("meta"):
        model = case.family.model(case.config)
    for number, (_, options) in enumerate(rungs):
        plan = make_plan(model, case.contract, replace(options, device="h200"))
        assert [name for name in ORDER if plan.on(name)] == list(ORDER[:number])


def test_what_is_compared_runs_first():
    order = [variant.key for variant in variants("pi05", 16, torch.device("cpu"))]
    assert order[:3] == ["official recipe @ 16", "eager @ 16", "+ graph_step @ 16"]
    assert order[-3:] == ["whole plan @ 32", "whole plan @ 64", "whole plan @ 128"]
    assert len(set(order)) == len(order) == 1 + len(ladder()) + 3
    assert variants("groot_n1_7", 16, torch.device("cpu"))[0].name == "eager"


def test_a_variant_that_fails_is_a_line_and_the_others_go_on(stubs, tmp_path, capsys):
    assert run(tmp_path / "record.json") == 0
    found = rows(tmp_path / "record.json")
    assert found["bad @ 2"]["error"] == "RuntimeError: illegal memory access"
    assert found["official recipe @ 2"]["p50"] == pytest.approx(0.2)
    assert "whole plan @ 4" in found and "whole plan @ 8" not in found, "no room for 4, so none for 8"
    assert "the plan is 1.00 × as fast as official recipe" in capsys.readouterr().out


def test_a_lost_device_is_left_behind(stubs, tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    monkeypatch.setattr(Table, "_alive", lambda self: False)
    assert run(record) == LOST and list(rows(record)) == ["official recipe @ 2", "bad @ 2"]
    monkeypatch.undo()
    body = json.loads(record.read_text())
    body["began"].append(f"+ {ORDER[-1]} @ 2")  # as if the process had ended in the middle of it
    record.write_text(json.dumps(body))
    made = [Variant(name, 2, Stub, None) for name in ("official recipe", "bad", f"+ {ORDER[-1]}", "+ last")]
    monkeypatch.setattr(gpu_steps, "variants", lambda *_: made)
    assert run(record) == 0
    found = rows(record)
    assert "ended or hung" in found[f"+ {ORDER[-1]} @ 2"]["error"] and "p50" in found["+ last @ 2"]
    assert len(found) == 4


def test_nothing_starts_that_would_end_too_late(stubs, tmp_path, capsys):
    assert run(tmp_path / "record.json", "--seconds", "5") == 0
    assert "left out: the time is up" in capsys.readouterr().out and not (tmp_path / "record.json").exists()


def test_the_steps_are_started_again_until_they_end(monkeypatch, tmp_path):
    lines, codes = [], [LOST, -9, 0]
    monkeypatch.setattr(gpu, "command", lambda name, line, seconds: lines.append(line) or codes.pop(0))
    args = argparse.Namespace(model="pi05", batch_size=4, output=tmp_path)
    assert gpu.steps(args, time.monotonic() + 100) == 0
    assert len(lines) == 3 and len({line[line.index("--record") + 1] for line in lines}) == 1
    assert gpu.steps(args, time.monotonic() + 5) == 1


def test_a_part_that_hangs_is_ended_with_its_workers(tmp_path):
    assert gpu.command("part", [sys.executable, "-c", "raise SystemExit(5)"], 60) == 5
    assert gpu.command("part", ["sh", "-c", f"sleep 600 & echo $! > '{tmp_path}/pid'; wait"], 2) == 1
    worker, deadline = (tmp_path / "pid").read_text().strip(), time.monotonic() + 60

    def state() -> str:
        return subprocess.run(["ps", "-o", "stat=", "-p", worker], capture_output=True, text=True).stdout.strip()

    while not (ended := state() == "" or state().startswith("Z")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended, state()


def test_a_kernel_that_fails_leaves_the_others_their_record(monkeypatch, tmp_path, capsys):
    def measured(spec, case, dtype, wrong):
        if spec.name == "glu":
            raise RuntimeError("illegal memory access")
        return [kernels.Timing(spec.name, case.name, "bfloat16", "ours", "forward", 1.0, 1.1, 10**6)]

    monkeypatch.setattr(kernels, "_compared_and_timed", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    args = argparse.Namespace(seconds=60, dtype="bfloat16", output=tmp_path)
    assert kernels.timed(["rms_norm", "glu"], args) == 1
    body = json.loads(next(tmp_path.glob("kernels-*.json")).read_text())
    assert {row["op"] for row in body["timings"]} == {"rms_norm"} and not body["left_out"]
    assert all("illegal memory access" in line for line in body["wrong"]) and len(body["wrong"]) > 1
    args.seconds = -1
    assert kernels.timed(["rms_norm", "glu"], args) == 0 and "cases left out" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["gpu"]) == 2 and "no CUDA device" in capsys.readouterr().out
