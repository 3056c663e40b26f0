"""Tables by embodiment that train in the rows in use alone, over 1 and 2 ranks: whole tables everywhere else."""

import json
from pathlib import Path

import pytest
import torch

from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.config import resolve
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.trainer import Trainer

BASE = [
    "--preset", "tiny", "--device", "cpu", "--num-workers", "0", "--eval-episodes", "none", "--lr-warmup-iters", "0",
    "--lr-base", "0.001", "--lr-decay-iters", "4", "--ema-decay", "0.9", "--save-interval", "4", "--no-save-rehearsal",
]  # fmt: skip
WHOLE = ["--without", "embodiments"]
SMALL = {
    "xvla": ["model.depth=1", "model.text.layers=1", "model.vision.depths=[1,1,1,1]", "--freeze-modules", "vlm"],
    "groot_n1_7": [
        "model.dit.layers=2", "model.text.layers=1", "model.select_layer=1", "model.vision.layers=1",
        "model.vision.deepstack=[0]",
    ],
}  # fmt: skip
SMALLER = ["model.image_size=32", "data.image_size=32", "model.action_horizon=4"]
FSDP = ["--distributed-strategy", "fsdp", "--fsdp-min-num-params", "0"]
ZERO1 = ["--distributed-strategy", "ddp", "--zero-optimizer"]
LORA = ["--use-lora", "--lora-r", "4", "--lora-modules-to-save", "head.action_encoder,head.state_encoder"]


def flags(folder: Path, model: str, iters: int, *more: str, batch: int = 4) -> list[str]:
    given = ["--model", model, *BASE, *SMALL[model], *SMALLER, "--output-dir", str(folder), "--train-iters", str(iters)]
    return [*given, "--per-device-batch-size", str(batch), *more]


def alone(argv: list[str], hooks) -> list[float]:
    """One process's run in this one; the losses of its steps."""
    Trainer(build_setup(resolve(argv)), hooks).train()
    return [row["loss"] for row in hooks.rows]


def plan(folder: Path, step: int) -> dict[str, str]:
    """Pass → state in a checkpoint's plan."""
    text = (folder / "checkpoints" / f"steps_{step}" / "plan.json").read_text()
    return {entry["name"]: entry["state"] for entry in json.loads(text)["passes"]}


def same(one: Path, other: Path, step: int, groups: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Both checkpoints hold the same to rounding under the same names; returns the last group of `other`."""
    for group in groups:
        a, b = (formats.read(folder / "checkpoints" / f"steps_{step}", group) for folder in (one, other))
        assert set(a) == set(b) and all(a[name].shape == b[name].shape for name in a)
        for name in a:
            torch.testing.assert_close(b[name], a[name], rtol=1e-3, atol=5e-4, msg=name)
    return dict(b)


def test_rows_in_use_shard_and_whole_tables_are_saved(tmp_path, take, record):
    """X-VLA under ZeRO-1, resumed under FSDP, resumed in one process without the pass; from its weights with
    `--init-on-meta`; and GR00T's adapters with tables that train: the numbers of whole tables in one process."""
    whole, parted, meta = tmp_path / "whole", tmp_path / "parted", tmp_path / "meta"
    expected = alone(flags(whole, "xvla", 3, *WHOLE), record())
    adapted = alone(flags(tmp_path / "adapted", "groot_n1_7", 2, *LORA, *WHOLE), record())
    start = str(whole / "checkpoints" / "steps_3")
    jobs = {
        "zero1": flags(parted, "xvla", 2, *ZERO1, batch=2),
        "fsdp": flags(parted, "xvla", 3, *FSDP, "--resume", batch=2),
        "meta": flags(meta, "xvla", 1, *FSDP, "--init-on-meta", "--pretrained-checkpoint", start, batch=2),
        "lora": flags(tmp_path / "lora", "groot_n1_7", 2, *LORA, *FSDP, batch=2),
    }
    losses = {name: result["loss"] for name, result in take(2, jobs, tmp_path).items()}
    assert losses["zero1"] + losses["fsdp"] == pytest.approx(expected, rel=1e-5)
    assert losses["lora"] == pytest.approx(adapted, rel=1e-5)
    from_weights = alone(flags(tmp_path / "plain", "xvla", 1, "--pretrained-checkpoint", start), record())
    assert losses["meta"] == pytest.approx(from_weights, rel=1e-5)
    on = [(parted, 2), (parted, 3), (meta, 1), (tmp_path / "lora", 2), (tmp_path / "plain", 1)]
    assert [plan(folder, step)["embodiments"] for folder, step in on] == ["on"] * len(on)
    saved = same(whole, parted, 3, ("model", "ema", "optim"))
    assert saved["exp_avg.policy.soft_prompts"][0].any() and not saved["exp_avg.policy.soft_prompts"][1:].any()
    adapter = same(tmp_path / "adapted", tmp_path / "lora", 2, ("adapter",))
    assert any(name.endswith("action_encoder.w1.table") for name in adapter)
    same(tmp_path / "plain", meta, 1, ("model",))
    again, on_whole = (alone(flags(folder, "xvla", 4, *WHOLE, "--resume"), record()) for folder in (parted, whole))
    assert again == pytest.approx(on_whole, rel=1e-5)
