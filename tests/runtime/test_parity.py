"""`forge-parity`: the official numbers hold, before and after lowering, and a fault does not pass unseen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlaforge.models import family
from vlaforge.models.golden import Quantity
from vlaforge.runtime.commands.parity import main
from vlaforge.runtime.parity import compare, judge, lower_with, table

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05"


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def change(file: Path, **values: torch.Tensor) -> None:
    tensors = load_file(file)
    save_file({**tensors, **values}, file)


@pytest.mark.parametrize("lower", [None, lower_with(compile="off")], ids=["plain", "lowered"])
def test_pi05_has_the_official_numbers(lower):
    report = compare(family("pi05"), GOLDEN, lower)
    outside = [row for row in report.rows if not row.ok]
    assert not outside, table(report)
    names = {row.name for row in report.rows}
    assert names >= set(load_file(GOLDEN / "expected.safetensors"))
    assert sum(name.startswith("|grad|") for name in names) == 121
    assert report.passed and report.last_line() == "parity pi05: 167 of 167 within tolerance"


def test_the_command_says_what_is_outside(damaged, capsys):
    expected = load_file(damaged / "expected.safetensors")
    change(damaged / "expected.safetensors", velocity=expected["velocity"] * 1.001, strange=torch.zeros(3))
    assert main(["--model", "pi05", "--golden", str(damaged)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "parity pi05: 166 of 168 within tolerance"
    assert any(line.startswith("velocity") and "OUTSIDE" in line for line in lines)
    assert any(line.startswith("strange") and "does not say what this is" in line for line in lines)
    assert any("121 gradient norms" in line for line in lines)


def test_a_wrong_weight_shows_in_outputs_and_gradients(damaged):
    name = "model.paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    weights = load_file(damaged / "weights.safetensors")
    change(damaged / "weights.safetensors", **{name: weights[name] * 1.5})
    report = compare(family("pi05"), damaged)
    outside = {row.name for row in report.rows if row.ok is False}
    assert {"loss", "velocity", "expert_layer1_mlp_out", "adamw_loss_trajectory", f"|grad| {name}"} <= outside
    assert not {"prefix_embs", "expert_layer0_mlp_out", "vision_tower_out.0"} & outside
    assert not report.passed


@pytest.mark.parametrize("arguments, message", [
    (["--model", "pi5", "--golden", str(GOLDEN)], "pi05"),
    (["--model", "pi05", "--golden", "/nowhere"], "is not a golden folder: it lacks config.json"),
    (["--model", "pi05", "--golden", str(GOLDEN), "--without", "fusee"], "fuse"),
])  # fmt: skip
def test_faults_of_the_user_are_one_sentence(arguments, message, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err


def test_verdicts():
    theirs = torch.tensor([1.0, -2.0])
    assert judge(Quantity("x", theirs + 1.9e-4), theirs).ok and not judge(Quantity("x", theirs + 2.1e-4), theirs).ok
    assert not judge(Quantity("x", torch.tensor([1.0])), theirs).ok
    assert not judge(Quantity("x", torch.tensor([1.0, torch.nan])), theirs).ok
    skipped = judge(Quantity("x", None, note="no such path here"), theirs)
    assert skipped.ok is None and skipped.verdict == "not compared" and skipped.note
    rows = torch.tensor([True, False])
    assert judge(Quantity("x", torch.tensor([1.0, 9.0]), where=rows), theirs).ok
    ids = torch.tensor([3, 4])
    assert judge(Quantity("x", ids, "exact"), ids).ok and not judge(Quantity("x", ids + 1, "exact"), ids).ok
