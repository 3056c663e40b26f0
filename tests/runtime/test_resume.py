"""Resume is whole: 12 steps are 6 and 6, bit for bit, whatever else the run uses; and what does not fit is said."""

import json

import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.runtime.checkpoint import formats, resumed
from vlaforge.runtime.config import resolve
from vlaforge.runtime.hooks import Hooks
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.trainer import Trainer

TWELVE = ["--train-iters", "12"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-workers", "0"],
        ["--num-workers", "2"],
        ["--save-format", "dcp", "--async-save", "--ema-decay", "0.9", "--gradient-accumulation-steps", "2"],
        [
            "--dtype",
            "bfloat16",
            "--save-format",
            "pt",
            "--lr-group",
            "expert=1e-3",
            "--weight-decay-grouping",
            "bias_norm",
        ],
        ["--optimizer", "SGD", "--sgd-momentum", "0.9", "--freeze-modules", "vision", "--without", "pack"],
    ],
    ids=["plain", "workers", "dcp-async-ema-accumulate", "bf16-pt-groups", "sgd-frozen"],
)  # fmt: skip
def test_six_and_six_are_twelve(runs, flags):
    whole = runs(*TWELVE, *flags)
    first = runs("--train-iters", "6", *flags, into="parted")
    second = runs(*TWELVE, *flags, "--resume", into="parted")
    assert any(note.startswith("Resuming from") and "steps_6" in note for note in runs.hooks.notes)
    assert second.completed == 12 and first.checkpoint.name == "steps_6"
    assert runs.losses(second) == runs.losses(whole)
    for group in ("model", "ema", "optim"):
        a, b = formats.read(whole.checkpoint, group), formats.read(second.checkpoint, group)
        assert (a is None) == (b is None)
        for name in a or ():
            assert torch.equal(a[name], b[name]), (group, name)


def test_resume_with_other_workers_plan_and_optimiser_code(runs):
    """The state is in canonical names: packed or not, fused or not, it is the same run up to rounding."""
    whole = runs(*TWELVE)
    runs("--train-iters", "6", into="parted")
    other = runs(*TWELVE, "--resume", "--num-workers", "1", "--without", "pack,optimizer,fuse", into="parted")
    for (step, loss, norm), (same, loss_, norm_) in zip(runs.losses(whole), runs.losses(other), strict=True):
        assert step == same and loss_ == pytest.approx(loss, rel=1e-4) and norm_ == pytest.approx(norm, rel=1e-3)


def test_resume_with_all_embodiments_or_those_in_use(tmp_path):
    """GR00T in bf16 with an average: the pass `embodiments` may come and go, and no bit of a checkpoint differs."""

    def train(into, iters, *flags):
        given = ["--model", "groot_n1_7", "--preset", "tiny", "--output-dir", str(tmp_path / into)]
        given += ["--train-iters", str(iters), "--lr-decay-iters", "4", "--per-device-batch-size", "2"]
        given += ["--num-workers", "0", "--eval-episodes", "none", "--dtype", "bfloat16", "--ema-decay", "0.9", *flags]
        trainer = Trainer(build_setup(resolve(given)), Hooks())
        trainer.train()
        return trainer

    without = ("--without", "embodiments")
    whole = train("whole", 3, *without)
    first, second = train("parted", 1), train("parted", 2, "--resume", *without)
    third = train("parted", 3, "--resume")
    assert "1 of 12 in use" in first.parts.plan.entry("embodiments").reason
    assert [run.parts.plan.on("embodiments") for run in (whole, first, second, third)] == [False, True, False, True]
    for group in ("model", "ema", "optim"):
        a, b = formats.read(whole.checkpoint, group), formats.read(third.checkpoint, group)
        assert set(a) == set(b) and [key for key in a if not torch.equal(a[key], b[key])] == [], group


def test_no_stale_rows(runs):
    """Rows of steps that died with the run are gone; a torn last line too."""
    first = runs("--train-iters", "4", "--save-interval", "2", into="x")
    (first.folder / "checkpoints" / "steps_4" / "manifest.json").unlink()
    with open(first.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    second = runs("--train-iters", "5", "--resume", into="x")
    assert [row["step"] for row in runs.rows(second)] == [1, 2, 3, 4, 5]
    assert any("steps_4 is broken" in note for note in runs.hooks.notes)


def test_resume_faults(runs):
    with pytest.raises(UserError, match="no whole checkpoint"):
        runs("--resume", into="empty")
    runs("--no-save-training-state", into="weights")
    with pytest.raises(UserError, match=r"no training state.*--pretrained-checkpoint"):
        runs("--resume", "--train-iters", "8", into="weights")
    trained = runs(into="other")
    with pytest.raises(UserError, match="data order cannot be resumed"):
        runs("--resume", "--train-iters", "8", "--seed", "5", into="other")
    with pytest.raises(UserError, match="does not fit the model"):
        runs("--resume", "--train-iters", "8", "model.expert.mlp_dim=256", into="other")
    longer = runs("--resume", "--train-iters", "8", into="other")  # a new target is honoured
    assert longer.completed == 8 and trained.completed == 6


def test_other_settings_are_named():
    """A setting that only one side has, such as a camera, is a change too; what trains nothing is not."""
    before = {"data.cameras": {}, "train.seed": 1, "train.num_workers": 2}
    now = {"data.cameras.base": "corner", "train.seed": 1, "train.num_workers": 0}
    assert resumed.changes(before, now) == {
        "data.cameras.base": (resumed.UNSET, "corner"),
        "data.cameras": ({}, resumed.UNSET),
    }
    assert resumed.changes(now, now) == {}


def test_average_may_be_added_later(runs):
    runs(into="x")
    trainer = runs("--resume", "--train-iters", "7", "--ema-decay", "0.5", into="x")
    assert any("no average of the weights" in note for note in runs.hooks.notes)
    weights, average = (formats.read(trainer.checkpoint, group) for group in ("model", "ema"))
    before = formats.read(trainer.store.folder / "steps_6", "model")
    expected = 0.5 * before["action_in.weight"] + 0.5 * weights["action_in.weight"]
    torch.testing.assert_close(average["action_in.weight"], expected)


def test_pretrained_weights_start_a_new_run(runs):
    first = runs(into="x")
    second = runs("--pretrained-checkpoint", str(first.folder), "--train-iters", "2", into="y")
    account = next(note for note in runs.hooks.notes if note.startswith("Weights from"))
    assert "loaded, 0 tied, 0 new by name, 0 unused" in account
    assert [row["step"] for row in runs.rows(second)] == [1, 2]
    with pytest.raises(UserError, match="does not fit the model"):
        runs("--pretrained-checkpoint", str(first.folder), "model.max_action_dim=6", into="z")
    runs(
        "--pretrained-checkpoint", str(first.folder), "model.max_action_dim=6", "--train-iters", "1",
        "--new-modules", "action_in,action_out", into="z",
    )  # fmt: skip
    assert any("4 new by name" in note for note in runs.hooks.notes)


def test_a_checkpoint_describes_itself(runs):
    trainer = runs("--train-iters", "2")
    held = trainer.checkpoint
    manifest = json.loads((held / "manifest.json").read_text())
    assert (manifest["step"], manifest["model"], manifest["preset"]) == (2, "pi05", "tiny")
    assert manifest["normalizers"] == trainer.setup.normalizers.hash
    assert set(manifest["files"]) >= {"config.yaml", "plan.txt", "plan.json", "normalizers.json", "tokenizer.json"}
    assert "forge plan" in (held / "plan.txt").read_text()
    assert not [path for path in held.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]
    again = runs("--config-file", str(held / "config.yaml"), "--train-iters", "2")
    assert runs.losses(again) == runs.losses(trainer)
