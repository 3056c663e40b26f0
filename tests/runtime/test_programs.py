"""The documented program of two datasets and two losses: both learn, both count by themselves, both resume."""

import importlib.util
import types

import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.data.loader import build_loader
from vlaforge.runtime import programs
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.programs import FinetuneTrainer, Interleaved, options
from vlaforge.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def two_streams(root):
    spec = importlib.util.spec_from_file_location("two_streams", root / "docs" / "examples" / "two_streams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def flags(monkeypatch, two_streams, root):
    entry = types.SimpleNamespace(name="TwoStreams", load=lambda: two_streams.TwoStreams)
    monkeypatch.setattr(programs, "entry_points", lambda group: [entry] if group == programs.ENTRY_POINTS else [])
    second = root / "tests" / "samples" / "metaworld_v21"
    return ["--trainer-type", "TwoStreams", "--trainer-options", f"text_path={second},text_weight=0.5",
            "--gradient-accumulation-steps", "2", "--lr-base", "3e-3"]  # fmt: skip


def test_two_datasets_two_losses(runs, flags):
    trainer = runs(*flags, "--train-iters", "12")
    rows = runs.rows(trainer)
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss/flow"] + row["loss/text"], rel=1e-5)
        assert row["samples"] == 6 * row["step"]
    assert rows[-1]["loss/text"] < 0.8 * rows[0]["loss/text"]
    robot, text = (trainer.parts.feed.loaders[name] for name in ("robot", "text"))
    assert robot.cursor.samples == 48 and text.cursor.samples == 24


def test_both_streams_resume(runs, flags):
    whole = runs(*flags, "--train-iters", "6")
    runs(*flags, "--train-iters", "3", into="x")
    parted = runs(*flags, "--train-iters", "6", "--resume", into="x")
    assert runs.losses(parted) == runs.losses(whole)
    a, b = (formats.read(t.checkpoint, "model") for t in (whole, parted))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_text_loss_counts_real_tokens_only(two_streams, runs):
    """Padding counts for nothing and changes nothing; the first token is predicted by none."""
    trainer = runs("--train-iters", "1")
    model, batch = trainer.model, trainer.setup.contract.synthetic(2, seed=1)
    batch["token_mask"][:, 20:] = False
    first = two_streams.next_token_loss(model, batch, None).terms["text"]
    assert float(first.count) == 2 * 19 and first.sum.requires_grad
    padded = batch.map(torch.clone)
    padded["tokens"][:, 20:] = 7
    assert torch.equal(two_streams.next_token_loss(model, padded, None).terms["text"].sum, first.sum)


def test_options():
    args = types.SimpleNamespace(trainer_options="a=1, b = x=y")
    assert options(args, {"a": None, "b": None, "c": "3"}) == {"a": "1", "b": "x=y", "c": "3"}
    with pytest.raises(UserError, match="did you mean 'weight'"):
        options(types.SimpleNamespace(trainer_options="wieght=1"), {"weight": None})
    with pytest.raises(UserError, match="must read name=value"):
        options(types.SimpleNamespace(trainer_options="weight"), {"weight": None})


def test_interleaved_checks_its_streams(runs):
    setup = runs("--train-iters", "1").setup
    loader = build_loader(setup.dataset, setup.processing, setup.contract, batch_size=1)
    with pytest.raises(UserError, match="Streams and pattern differ in b"):
        Interleaved({"a": loader}, ("a", "b"))
    both = Interleaved({"a": loader}, ("a",))
    with pytest.raises(UserError, match="knows no data stream 'a'"):
        both.load_state_dict({"z": {}})
    assert Ranks().leads


def test_the_embodiments_of_a_run_are_those_of_all_its_datasets(two_streams):
    numbers = {"left": 3, "right": 7, "": 5}
    dataset, held_out = (types.SimpleNamespace(embodiments=names) for names in (("left", "right"), ("",)))
    processing = types.SimpleNamespace(embodiment_of=numbers.__getitem__)
    setup = types.SimpleNamespace(processing=processing, dataset=dataset, held_out=None)
    assert FinetuneTrainer().embodiments(setup) == {3, 7}
    setup.held_out = held_out
    assert FinetuneTrainer().embodiments(setup) == {3, 5, 7}
    assert two_streams.TwoStreams().embodiments(setup) is None  # it has data of its own
    setup.processing = object()
    assert FinetuneTrainer().embodiments(setup) is None
