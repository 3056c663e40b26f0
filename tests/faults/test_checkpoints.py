"""Weights that do not fit and runs that cannot be resumed: refused before a model is built, with what differs."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlaforge.runtime.checkpoint.files import digest

WEIGHTS = {
    "renamed": (
        lambda state: state.update(action_inn=state.pop("action_in.weight")),
        ("action_in.weight", "action_inn"),
    ),
    "missing": (lambda state: state.pop("action_in.bias"), ("1 missing (action_in.bias)",)),
    "extra": (lambda state: state.update(more=torch.zeros(3)), ("1 unexpected (more)",)),
    "another shape": (lambda state: state.update({"action_in.bias": torch.zeros(3)}), ("action_in.bias", "(3,)")),
    "another model's": (lambda state: [state.pop(name) for name in list(state)[1:]], ()),
    "empty": (lambda state: state.clear(), ()),
}
RESUMED = {
    "--seed 5": ("The data order cannot be resumed: seed was 3047, now 5",),
    "--episodes 0-2": ("--pretrained-checkpoint",),
    "--no-sampler-shuffle": ("shuffle was True, now False",),
    "--streaming": ("The data order cannot be resumed: order was Shuffled, now StreamOrder",),
    "--freeze-modules vision": ("parameters that do not train now (vision.", "train.freeze_modules was , now vision"),
    "model.train_expert_only=true": ("parameters that do not train now", "model.train_expert_only was False, now True"),
    "model.vision.depth=2": ("does not fit the model", "model.vision.depth was 1, now 2"),
    "model.language.mlp_dim=64": ("does not fit the model", "model.language.mlp_dim was"),
    "--optimizer SGD": ("holds the state of AdamW, and SGD would go on from it: give --optimizer AdamW",),
    "--use-lora": ("is a whole model: leave out --use-lora to resume it.",),
    "data.normalization_mode=mean_std": ("cannot be resumed with another normalisation",),
    "data.cameras.base_0_rgb=gripper": ("the dataset's cameras are: scene, wrist",),
    "--pretrained-checkpoint /nowhere": ("'/nowhere' does not exist",),
}


@pytest.fixture
def resumed(request, forge, monkeypatch, tmp_path):
    """The sentence with which ``--resume`` of a copy of the finished run is refused, before training begins."""
    finished = request.getfixturevalue(getattr(request, "param", "trained"))
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    built = "vlaforge.runtime.trainer.build_model"

    def began(*args):
        raise AssertionError("a model was built")

    monkeypatch.setattr(built, began)

    def sentence(*argv: str) -> str:
        return forge("--output-dir", str(tmp_path / "run"), "--resume", "--train-iters", "4", *argv).sentence

    return sentence


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_do_not_fit(refused, trained, tmp_path, case):
    state = load_file(trained / "checkpoints/steps_2/model.safetensors")
    change, words = WEIGHTS[case]
    change(state)
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    said = refused("--pretrained-checkpoint", str(path))
    assert all(word in said for word in words), said


def test_weights_that_cannot_be_read(refused, trained, tmp_path):
    whole = (trained / "checkpoints/steps_2/model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for content in (b"", b"x", whole[:1000], whole[: len(whole) // 2], b"\xff" * 64, b"{}" * 40):
        path.write_bytes(content)
        assert "is no whole safetensors file" in refused("--pretrained-checkpoint", str(path))
    path = tmp_path / "weights.pt"
    for content in (b"", b"x", pickle.dumps(print), pickle.dumps([1])):
        path.write_bytes(content)
        assert str(path) in refused("--pretrained-checkpoint", str(path))
    torch.save({"step": 3}, path)
    assert "holds no dict of tensors" in refused("--pretrained-checkpoint", str(path))
    (tmp_path / "empty").mkdir()
    assert "holds no weights" in refused("--pretrained-checkpoint", str(tmp_path / "empty"))
    (tmp_path / "empty/model.safetensors.index.json").write_text("[]")
    assert "is no index" in refused("--pretrained-checkpoint", str(tmp_path / "empty"))
    (tmp_path / "empty/model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert "gone.safetensors" in refused("--pretrained-checkpoint", str(tmp_path / "empty"))


def test_a_broken_checkpoint_of_ours(refused, trained, tmp_path):
    copy = tmp_path / "steps_2"
    shutil.copytree(trained / "checkpoints/steps_2", copy)
    (copy / "manifest.json").write_text("{")
    assert "manifest.json cannot be read" in refused("--pretrained-checkpoint", str(copy))
    (copy / "manifest.json").unlink()
    with open(copy / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    assert "is no whole safetensors file" in refused("--pretrained-checkpoint", str(copy))


def test_adapters(refused, tmp_path):
    """An adapter's folder that is none, is damaged, or is of something else."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    flags = ("--use-lora", "--lora-adapter", str(folder))
    assert "is no LoRA adapter" in refused(*flags)
    for text, words in (
        ("{", "cannot be read"),
        ("[]", "does not hold the settings of an adapter"),
        ('{"peft_type": "IA3"}', "which is not plain LoRA"),
        ('{"peft_type": "LORA"}', "lacks a rank r"),
        ('{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}', "There is no file"),
    ):
        (folder / "adapter_config.json").write_text(text)
        assert words in refused(*flags)
    assert "--lora-adapter is given without --use-lora" in refused(*flags[1:])
    save_file({"base_model.model.x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    assert "The adapter does not fit the model" in refused(*flags)


@pytest.mark.parametrize("flags", RESUMED)
def test_what_may_not_change_at_a_resume(resumed, flags):
    said = resumed(*flags.split())
    assert all(words in said for words in RESUMED[flags]), said


@pytest.mark.parametrize("resumed", ["trained_dcp"], indirect=True)
@pytest.mark.parametrize("flags", ["--freeze-modules vision", "model.vision.depth=2", "model.language.mlp_dim=64"])
def test_what_may_not_change_is_known_of_dcp_too(resumed, flags):
    """Names and shapes of weights and optimiser state are in its table of contents."""
    test_what_may_not_change_at_a_resume(resumed, flags)


def test_another_algorithm_goes_on_only_when_asked_for(forge, resumed, tmp_path):
    """Adam's state means something else to AdamW; the same algorithm in another library's code does not."""
    rename(tmp_path / "run/checkpoints/steps_2", "AdamW", "Adam")
    assert "give --optimizer Adam (or --optimizer AdamW, if the change is meant)" in resumed()
    asked = forge("--output-dir", str(tmp_path / "run"), "--resume", "--optimizer", "AdamW", "--dry-run")
    assert asked.code == 0 and "train.optimizer was Adam, now AdamW" in asked.out
    rename(tmp_path / "run/checkpoints/steps_2", "Adam", "ForgeAdamW")
    assert forge("--output-dir", str(tmp_path / "run"), "--resume", "--dry-run").code == 0


def rename(checkpoint: Path, old: str, new: str) -> None:
    """A checkpoint as if another optimiser had written it, whole by its manifest."""
    path = checkpoint / "config.yaml"
    path.write_text(path.read_text().replace(f"optimizer: {old} ", f"optimizer: {new} "))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["config.yaml"] = digest(path)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_nothing_whole_to_resume_from(resumed, tmp_path):
    """All checkpoints broken, and folders that are none: said, and nothing is removed."""
    folder = tmp_path / "run/checkpoints"
    for step in (1, 2):
        (folder / f"steps_{step}/model.safetensors").write_bytes(b"x")
    (folder / "steps_abc").mkdir()
    (folder / "steps_9").write_text("no folder")
    assert "There is no whole checkpoint in" in resumed()
    assert (folder / "steps_1/model.safetensors").is_file()


def test_without_training_state(resumed, tmp_path):
    checkpoint = tmp_path / "run/checkpoints/steps_2"
    (checkpoint / "state.json").unlink()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["files"]["state.json"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "no training state" in resumed()
