"""Exports: what is written is what was meant, in every form; an official one works in the official code."""

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vlaforge import models
from vlaforge.data.collate import collate
from vlaforge.data.errors import UserError
from vlaforge.data.schema import IMAGES, STATE, TASK, Draw
from vlaforge.models.pi05.convert import LAYOUTS
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.checkpoint.weights import model_tensors
from vlaforge.runtime.commands.run import main
from vlaforge.runtime.config import resolve
from vlaforge.runtime.export import export
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.trainer import Trainer


def exported(trainer, *flags):
    """Exports a run through its own saved configuration, and returns the folder."""
    held = trainer.checkpoint / "config.yaml"
    notes = []
    path = export(resolve(["--config-file", str(held), *flags]), notes.append)
    return path, notes


@pytest.mark.parametrize("format", [*formats.FORMATS, "lerobot", "openpi"])
def test_every_form_holds_the_same_weights(runs, format):
    trainer = runs("--train-iters", "2")
    path, notes = exported(trainer, "--export", format)
    wanted = model_tensors(trainer.model)
    if format in formats.FORMATS:
        found = formats.read(path, "model")
        assert formats.read(path, "optim") is None and (path / "normalizers.json").is_file()
    else:
        shapes = {name: value.shape for name, value in wanted.items()}
        found, account = LAYOUTS[format].load(load_file(path / "model.safetensors"), shapes)
        assert not account.new
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "tensors" in notes[-1]
    with pytest.raises(UserError, match="is there already"):
        exported(trainer, "--export", format)


@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_precision_is_what_was_asked_for(runs, trained, wanted):
    """The file's header says so, integers stay integers, and the live model is as it was."""
    trainer = runs("--train-iters", "1", "--dtype", trained)
    before = {name: value.dtype for name, value in model_tensors(trainer.model).items()}
    path, _ = exported(trainer, "--export", "safetensors", "--export-dtype", wanted)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {{"float32": "F32", "bfloat16": "BF16"}[wanted]}
    assert {name: value.dtype for name, value in model_tensors(trainer.model).items()} == before


def test_averages_are_exported_unless_told_otherwise(runs):
    trainer = runs("--ema-decay", "0.9", "--lr-base", "1e-3")
    average = formats.read(trainer.checkpoint, "ema")
    path, notes = exported(trainer, "--export", "safetensors")
    other, _ = exported(
        trainer, "--export", "safetensors", "--export-dir", str(runs.folder / "last"), "--no-export-average"
    )
    a, b = formats.read(path, "model"), formats.read(other, "model")
    assert torch.equal(a["action_in.weight"], average["action_in.weight"])
    assert torch.equal(b["action_in.weight"], trainer.model.action_in.weight)
    assert not torch.equal(a["action_in.weight"], b["action_in.weight"]) and "averaged" in notes[0]


def test_adapters_are_merged_and_the_result_is_equal(runs):
    base = runs("--train-iters", "1")
    flags = ["--use-lora", "--lora-r", "4", "--pretrained-checkpoint", str(base.folder), "--lr-base", "3e-3"]
    trainer = runs(*flags)
    path, notes = exported(trainer, "--export", "safetensors")
    assert any("Adapters merged: the loss on a synthetic batch differs by" in note for note in notes)
    merged = formats.read(path, "model")
    assert set(merged) == set(model_tensors(base.model))
    module = trainer.model.layers[0].expert.qkv.q_proj
    torch.testing.assert_close(merged["layers.0.expert.qkv.q_proj.weight"], module.weight.data + module.delta())
    again = runs("--pretrained-checkpoint", str(path), "--train-iters", "1", "--lr-base", "1e-9")
    assert "0 new by name" in next(note for note in runs.hooks.notes if note.startswith("Weights from"))
    assert again.completed == 1


def test_the_command_needs_only_the_folder(runs, capsys):
    trainer = runs("--train-iters", "1")
    trainer.setup.resolved.save(trainer.folder / "config.yaml")  # as forge-run does
    assert main(["--export", "openpi", "--output-dir", str(trainer.folder)]) == 0
    assert "Exported" in capsys.readouterr().out
    assert main(["--export", "lerobt", "--output-dir", str(trainer.folder)]) == 2
    assert "did you mean 'lerobot'" in capsys.readouterr().err
    stats = json.loads((trainer.folder / "export/openpi/assets/vlaforge/norm_stats.json").read_text())["norm_stats"]
    assert stats["actions"]["q01"] == pytest.approx(trainer.setup.normalizers.get("action").a.tolist())
    with pytest.raises(UserError, match="no whole checkpoint"):
        export(resolve(["--model", "pi05", "--export", "pt", "--output-dir", str(runs.folder / "no")]), print)


WITH_FILES = [name for name in models.available() if (models.family(name).folder / "companions.py").is_file()]


@pytest.mark.parametrize("family", WITH_FILES)
def test_files_beside_the_weights(family):
    """JSON in every layout; LeRobot's: features of the robot, and both pipelines with the statistics they name."""
    family = models.family(family)
    resolved = resolve(["--model", family.name, "--preset", "tiny", "model.max_action_dim=4", "model.max_state_dim=4"])
    keys, bounds = ("action", "observation.state"), {"q01": 0.0, "q99": 1.0}
    statistics = {key: {name: [value] * 4 for name, value in bounds.items()} for key in keys}
    dataset = {"cameras": {"scene": {"height": 48, "width": 64}}, "action_dim": 4, "state_dim": 4, "robot_type": None}
    make = family.part("companions").companions
    found = {
        layout: make(layout, resolved.model_config, resolved.data_config, dataset, statistics)
        for layout in family.part("convert").LAYOUTS
    }
    assert any(found.values())
    for files in found.values():
        texts = {name: json.loads(content) for name, content in files.items() if name.endswith(".json")}
        if "policy_preprocessor.json" not in texts:
            continue
        config = texts["config.json"]
        assert family.name.startswith(config["type"]) and config["output_features"]["action"]["shape"] == [4]
        assert set(config["input_features"]) == {"observation.images.scene", "observation.state"}
        for pipeline in ("policy_preprocessor", "policy_postprocessor"):
            named = [step["state_file"] for step in texts[f"{pipeline}.json"]["steps"] if "state_file" in step]
            if config["type"] == "groot":  # reads bounds of any kind as min and max, and decodes by parts
                assert len(named) == (pipeline == "policy_preprocessor")
                assert all(torch.equal(files[file]["action.max"], torch.ones(4)) for file in named)
            else:
                (file,) = named
                assert torch.equal(files[file]["action.q99"], torch.ones(4))


PEER = os.environ.get("VLAFORGE_PEER_PYTHON")


FASTWAM = ["model.max_action_dim=4", "model.max_state_dim=4", "--lr-base", "1e-2", "--min-lr", "1e-2"]
"""LeRobot's pads nothing; and after fewer or smaller steps the state hardly moves the actions."""


@pytest.mark.skipif(PEER is None, reason="set VLAFORGE_PEER_PYTHON to an interpreter with LeRobot 0.6.1")
@pytest.mark.parametrize(
    "family, marks, flags",
    [
        ("pi05", ("<bos>", None), []),
        ("xvla", ("<bos>", "<eos>"), ["model.image_resize=pad_left_top"]),
        ("groot_n1_7", (None, None), []),
        ("groot_n1_7", (None, None), ["relative"]),
        ("fastwam", (None, "<eos>"), FASTWAM),
    ],
)
def test_lerobots_policy_gives_the_same_actions(family, marks, flags, runs, root, tmp_path):
    """Raw frames, state and task through LeRobot's pipelines and policy, and through ours: the same robot actions."""
    flags = relative_processor(tmp_path / "official") if flags == ["relative"] else flags
    flags = ["--lr-base", "1e-3", "data.normalization_convention=lerobot", "--train-iters", "8", *flags]
    trainer = runs(*flags) if family == "pi05" else tiny_run(family, tmp_path / "run", *flags)
    setup, model = trainer.setup, trainer.model.eval()
    steps = getattr(setup.model_config, "num_inference_steps", None) or setup.model_config.num_inference_timesteps
    path, _ = exported(trainer, "--export", "lerobot")
    base, _ = exported(trainer, "--export", "nvidia") if family == "groot_n1_7" else (None, None)
    needs = replace(setup.processing.needs(), image_offsets=(0,))
    samples = [setup.dataset.get(position, needs) for position in (0, 40, 111)]
    if family == "fastwam":  # the frozen encoders, which no checkpoint holds
        model.vae.net("cpu").save_pretrained(tmp_path / "encoders/vae")
        model.text.net("cpu").save_pretrained(tmp_path / "encoders/text_encoder")
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(3, 1, *setup.contract.draws["noise"].shape, generator=generator)[:, 0]
    given = {"noise": noise, STATE: torch.stack([torch.from_numpy(s[STATE]) for s in samples])}
    for name in setup.processing.cameras:
        frames = torch.from_numpy(np.stack([s[IMAGES + name] for s in samples])).permute(0, 3, 1, 2).contiguous()
        # GR00T's pipeline truncates to bytes, and k / 255 · 255 is not always k.
        given[IMAGES + name] = frames if base else frames.float().div(255)
    save_file(given, tmp_path / "observations.safetensors")
    job = {
        "model": family,
        "marks": marks,
        "root": str(root),
        "export": str(path),
        "base": str(base),
        "encoders": str(tmp_path / "encoders"),
        "sizes": asdict(setup.model_config),
        "tokenizer": str(setup.tokenizer.path),
        "observations": str(tmp_path / "observations.safetensors"),
        "tasks": [s[TASK] for s in samples],
        "result": str(tmp_path / "result.safetensors"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("peer_lerobot_policy.py")
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([PEER, script, tmp_path / "job.json"], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = load_file(tmp_path / "result.safetensors")
    for number, sample in enumerate(samples):
        fields = [setup.processing.observe(sample) | _targets(setup)]
        batch = collate(fields, setup.contract, trim=False)
        actions = model.act(batch, Draw(noise=noise[number : number + 1]), steps)
        ours = torch.from_numpy(setup.processing.actions(actions[0].numpy(), sample))
        tokens = batch["tokens"][0]
        tokens = tokens[batch["token_mask"][0]] if "token_mask" in batch else tokens
        found = theirs[f"tokens.{number}"][0]
        assert torch.equal(found if base else found[: len(tokens)], tokens)  # GR00T's are not padded
        learned = getattr(setup.processing.data, "action_steps", None)
        torch.testing.assert_close(theirs[f"actions.{number}"][0], ours[:learned], rtol=1e-4, atol=1e-4)


def relative_processor(folder):
    """Writes an official processor whose hand moves relative to its state, by the range of each step; its flags."""
    parts, reps = {"hand": 3, "gripper": 1}, ("RELATIVE", "ABSOLUTE")
    configs = [{"rep": rep, "type": "NON_EEF", "format": "DEFAULT", "state_key": None} for rep in reps]
    whole = {name: {end: [value] * dim for end, value in BOUNDS.items()} for name, dim in parts.items()}
    widths = [0.2 + 0.1 * step for step in range(8)]
    shares = {"min": -0.5, "max": 1.0, "mean": 0.0, "std": 1.0}
    steps = {end: [[share * width] * 3 for width in widths] for end, share in shares.items()}
    tag = "new_embodiment"
    modality = {
        "video": {"delta_indices": [0], "modality_keys": ["scene", "wrist"]},
        "state": {"delta_indices": [0], "modality_keys": list(parts)},
        "action": {"delta_indices": list(range(8)), "modality_keys": list(parts), "action_configs": configs},
    }
    settings = {
        "modality_configs": {tag: modality}, "use_relative_action": True, "use_percentiles": True, "crop_fraction": 0.9,
        "image_target_size": [64, 64], "max_action_horizon": 16,
    }  # fmt: skip
    values = {"state": whole, "action": whole, "relative_action": {"hand": steps}}
    folder.mkdir()
    (folder / "processor_config.json").write_text(json.dumps({"processor_kwargs": settings}))
    (folder / "statistics.json").write_text(json.dumps({tag: values}))
    return [f"data.official_folder={folder}", f"data.embodiment_tag={tag}"]


BOUNDS = {"min": -0.5, "max": 1.5, "q01": -0.4, "q99": 1.2, "mean": 0.5, "std": 0.3}


def tiny_run(family, folder, *flags):
    """A few steps of the family's tiny preset on the bundled data."""
    small = ["--per-device-batch-size", "2", "--num-workers", "0", "--eval-episodes", "none", "--lr-warmup-iters", "2"]
    argv = ["--model", family, "--preset", "tiny", *small, "--output-dir", str(folder), *flags]
    trainer = Trainer(build_setup(resolve(argv)))
    trainer.train()
    return trainer


def _targets(setup):
    """Fields of the contract that an observation does not fill."""
    empty = setup.contract.synthetic(1)
    return {name: empty[name][0].numpy() for name, field in setup.contract.fields.items() if not field.observation}
