"""What holds for every family, found by discovery: its tiny preset trains, is pure, ready for capture, resumes bit for
bit, takes adapters, and goes out to its official layouts and back."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlaforge import models
from vlaforge.data.schema import Batch, make_draw
from vlaforge.graphs.check import check_step
from vlaforge.models.convert import load_official, read_safetensors
from vlaforge.runtime.checkpoint.store import Checkpoints
from vlaforge.runtime.commands.profile import main as profile
from vlaforge.runtime.commands.run import main
from vlaforge.runtime.config import resolve

FAMILIES = [name for name in models.available() if "tiny" in models.family(name).presets()]
QUICK = ("--train-iters", "3", "--per-device-batch-size", "2", "--num-workers", "0", "--lr-warmup-iters", "1",
         "--video-backend", "pyav", "--no-save-rehearsal", "--save-interval", "2")  # fmt: skip


def test_every_family_has_a_tiny_preset():
    assert models.available() == FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_the_commands_of_its_readme_are_right(name):
    """Every flag and setting of them exists, and one fine-tunes from published weights."""
    blocks = re.findall(r"```\n(.*?)```", (models.family(name).folder / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith(("forge-run", "forge-data"))]
    resolved = [resolve([word for word in words[1:] if word not in ("precompute", "--output", "CACHE")])
                for words in commands]  # fmt: skip
    assert all(one.family.name == name for one in resolved)
    assert any(one.args.pretrained_checkpoint and one.args.dataset_path for one in resolved)


class Tiny:
    """A family's tiny model with random weights, and a synthetic batch of it."""

    def __init__(self, name: str):
        self.name, self.family = name, models.family(name)
        self.config = resolve(["--model", name, "--preset", "tiny"]).model_config
        self.contract = self.family.model.contract(self.config)
        torch.manual_seed(0)
        self.model = self.family.model(self.config).train()
        for parameter in self.model.parameters():
            if parameter.detach().abs().max() == 0:
                torch.nn.init.normal_(parameter, std=0.02)
        self.batch = self.contract.synthetic(2, seed=1)
        self.draw = make_draw(self.contract.draws, range(2), seed=0, epoch=0)

    def run(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and every gradient by name."""
        self.model.zero_grad(set_to_none=True)
        loss = self.model(batch, self.draw).total()
        loss.backward()
        return loss.detach(), {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request) -> Tiny:
    return Tiny(request.param)


def test_a_synthetic_batch_gives_a_loss_and_all_gradients(tiny):
    tiny.contract.check(tiny.batch)
    loss, gradients = tiny.run(tiny.batch)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients.values())
    trained = {name for name, parameter in tiny.model.named_parameters() if parameter.requires_grad}
    assert trained == set(gradients), "what trains without a gradient must be frozen, or DDP waits for it"


def test_counts_need_no_forward_and_match_the_loss(tiny):
    batch = Batch(tiny.batch, action_mask=tiny.batch["action_mask"].clone())
    batch["action_mask"][1, 1:] = False
    terms, counts = tiny.model(batch, tiny.draw).terms, tiny.model.counts(batch)
    assert set(terms) == set(counts)
    assert all(torch.equal(terms[name].count, counts[name]) for name in terms)


@pytest.mark.parametrize("garbage", [1e6, float("nan")])
def test_garbage_in_padded_actions_changes_no_bit(tiny, garbage):
    batch = Batch(tiny.batch, action_mask=tiny.batch["action_mask"].clone())
    batch["action_mask"][0, 3:] = False
    dirty = Batch(batch, actions=batch["actions"].masked_fill(~batch["action_mask"], garbage))
    (clean_loss, clean), (dirty_loss, other) = tiny.run(batch), tiny.run(dirty)
    assert torch.equal(clean_loss, dirty_loss)
    assert all(torch.equal(clean[name], other[name]) for name in clean)


def test_sampling_reads_observations_alone(tiny):
    fields = tiny.contract.fields
    observation = Batch({name: value for name, value in tiny.batch.items() if fields[name].observation})
    model = tiny.model.eval()
    try:
        actions = model.act(observation, tiny.draw, 2)
    finally:
        model.train()
    assert actions.isfinite().all() and actions.shape[:2] == tiny.batch["actions"].shape[:2]


def test_a_step_has_no_host_sync_and_no_shape_that_depends_on_data(tiny):
    batch = tiny.model.encode_frozen(tiny.batch)  # runs ahead, outside of the captured step

    def step() -> None:
        tiny.model(batch, tiny.draw).total().backward()

    report = check_step(step)
    assert report.ok, report.text()


def test_the_whole_step_of_a_run_is_ready_for_capture(tiny, capsys):
    """Lowered by the plan, with the optimiser and its guards."""
    assert profile(["--check", "--model", tiny.name, "--preset", "tiny", *QUICK[2:6]]) == 0
    assert "ready for capture" in capsys.readouterr().out


def test_blocks_towers_and_fp32_paths_exist(tiny):
    names = {name for name, _ in tiny.model.named_modules()} | {name for name, _ in tiny.model.named_parameters()}
    for group in tiny.model.blocks():
        assert {type(block) for block in group.modules(tiny.model)} == {type(group.modules(tiny.model)[0])}
    assert {path for paths in tiny.model.towers().values() for path in paths} <= names


# ------------------------------------------------------------------------------------------- runs


def run(*argv: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(argv)
    assert code == 0, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory) -> Path:
    """The folder of a run of three steps on the bundled demonstrations."""
    folder = tmp_path_factory.mktemp(tiny.name) / "out"
    said = run("--model", tiny.name, "--preset", "tiny", *QUICK, "--output-dir", str(folder))
    assert "step 3/3" in said
    return folder


def test_it_trains_on_the_bundled_demonstrations(trained):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 3 and all(loss == loss and abs(loss) < 1e6 for loss in losses)


def test_it_trains_on_synthetic_data(tiny, tmp_path):
    said = run("--model", tiny.name, "--preset", "tiny", *QUICK, "--dataset-format", "dummy_datasets",
               "--eval-episodes", "none", "--output-dir", str(tmp_path / "out"))  # fmt: skip
    assert "step 3/3" in said


def test_a_run_that_stopped_goes_on_bit_for_bit(tiny, trained, tmp_path):
    _goes_on(("--model", tiny.name, "--preset", "tiny", *QUICK), trained, tmp_path / "out", "model.safetensors")


def test_adapters_train_and_go_on_bit_for_bit(tiny, tmp_path):
    flags = ("--model", tiny.name, "--preset", "tiny", *QUICK, "--use-lora", "--lora-r", "2")
    run(*flags, "--output-dir", str(tmp_path / "whole"))
    _goes_on(flags, tmp_path / "whole", tmp_path / "out", "adapter_model.safetensors")


def _goes_on(flags: tuple[str, ...], whole: Path, folder: Path, file: str) -> None:
    """A run of three steps that lost its last checkpoint, resumed: every row and every weight as they were."""
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "steps_3")
    assert "Resuming from" in run(*flags, "--resume", "--output-dir", str(folder))
    kept = ("step", "loss", "grad_norm")
    before, after = (
        [[row.get(name) for name in kept] for row in map(json.loads, (at / "metrics.jsonl").read_text().splitlines())]
        for at in (whole, folder)
    )
    assert before == after and len(after) == 3
    ours, theirs = (read_safetensors(at / "checkpoints" / "steps_3" / file) for at in (whole, folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_goes_to_every_official_layout_and_back(tiny, trained, tmp_path):
    checkpoint = Checkpoints(trained / "checkpoints").newest()[1]
    config = replace(tiny.config, **_robot(checkpoint))
    for layout in tiny.family.part("convert").LAYOUTS:
        target = tmp_path / layout
        run("--model", tiny.name, "--preset", "tiny", "--export", layout, "--export-dir", str(target),
            "--output-dir", str(trained))  # fmt: skip
        whole = next(target.rglob("model*.safetensors"))
        model = tiny.family.model(config)
        load_official(model, tiny.family.part("convert").LAYOUTS, read_safetensors(whole), layout)
        ours = read_safetensors(next(checkpoint.rglob("model*.safetensors")))
        assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())


def _robot(checkpoint: Path) -> dict[str, int]:
    said = json.loads((checkpoint / "dataset.json").read_text())
    return {name: said[name] for name in ("action_dim", "state_dim")}
