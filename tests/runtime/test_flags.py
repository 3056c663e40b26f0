"""Parsing of flags and dotlists, ranges, choices, help."""

from __future__ import annotations

import dataclasses

import pytest

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs, profile_range
from vlaforge.runtime.flags import flags_of, group, help_text, parse

FLAGS = {entry.field: entry for entry in flags_of(TrainingArgs)}


def given(*argv: str):
    return parse(TrainingArgs, argv)


def test_flags_and_settings_in_any_order():
    mixed = given("model.a=1", "--train-iters", "5", "data.b=x=y", "--compile", "model.c=[1, 2]", "--lr-base=1e-3")
    assert mixed.flags == {"train_iters": 5, "compile": True, "lr_base": 1e-3}
    assert mixed.dotlist == [("model.a", "1"), ("data.b", "x=y"), ("model.c", "[1, 2]")]


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--model-name", "pi05"], "model", "pi05"),
        (["--no-compile"], "compile", False),
        (["--no-save-training-state"], "save_training_state", False),
        (["--compile=true"], "compile", True),
        (["--clip-grad", "-1"], "clip_grad", -1.0),
        (["--lr-decay-iters", "none"], "lr_decay_iters", None),
        (["--without", "fuse,pack"], "without_passes", ("fuse", "pack")),
        (["--without", "fuse", "pack", "model.x=1"], "without_passes", ("fuse", "pack")),
        (["--with", "[remat]"], "with_passes", ("remat",)),
        (["--train_iters", "7"], "train_iters", 7),
        (["--lr-base", "1e-5"], "lr_base", 1e-5),
        (["--dataset-path", "a=b"], "dataset_path", "a=b"),
        (["--eval-episodes", "5"], "eval_episodes", "5"),
    ],
)
def test_values(argv, field, value):
    found = given(*argv).flags[field]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--train-it", "5"], ["--train-it", "did you mean '--train-iters'"]),
        (["--modle", "pi05"], ["--modle", "'--model'"]),
        (["--train-iters"], ["--train-iters needs a value"]),
        (["--train-iters", "--compile"], ["--train-iters needs a value"]),
        (["--train-iters", "many"], ["--train-iters is 'many'", "an integer"]),
        (["--train-iters", "1.5"], ["--train-iters is 1.5", "an integer"]),
        (["--lr-base", "fast"], ["--lr-base is 'fast'", "a number"]),
        (["--compile=perhaps"], ["--compile is 'perhaps'", "true or false"]),
        (["--no-train-iters"], ["--no-train-iters"]),
        (["--no-compile=1"], ["takes no value"]),
        (["-c"], ["'-c' is neither a flag nor a setting"]),
        (["compile"], ["did you mean '--compile'"]),
    ],
)
def test_faults_are_one_sentence(argv, words):
    with pytest.raises(UserError) as caught:
        given(*argv)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("train_iters", 0, "--train-iters is 0: it must be at least 1."),
        ("per_device_batch_size", -4, "--per-device-batch-size is -4: it must be at least 1."),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("lr_base", 0.0, "above 0"),
        ("adam_beta2", 1.0, "below 1"),
        ("num_workers", -1, "at least 0"),
        ("log_interval", 0, "at least 1"),
        ("optimizer", "adamw", "did you mean AdamW?"),
        ("dtype", "int8", "allowed are bfloat16"),
        ("profile", "12:10", "10:12"),
    ],
)
def test_ranges_and_choices(field, value, words):
    with pytest.raises(UserError, match=r"^--") as caught:
        TrainingArgs(**{field: value})
    assert words in str(caught.value)


def test_a_dtype_may_have_either_name():
    assert TrainingArgs(dtype="bf16", export_dtype="fp16") == TrainingArgs(dtype="bfloat16", export_dtype="float16")
    assert TrainingArgs(fsdp_reduce_dtype="bfloat16").fsdp_reduce_dtype == "bf16"


def test_every_bound_is_enforced():
    """Each declared bound refuses the first value outside it and accepts the default."""
    for entry in FLAGS.values():
        for key, offset in (("low", -1), ("high", 1), ("above", 0), ("below", 0)):
            bound = entry.meta[key]
            if bound is not None:
                with pytest.raises(UserError):
                    entry.check(bound + offset)
        entry.check(entry.default)
        for choice in entry.meta["choices"]:
            entry.check(choice)


def test_arguments_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainingArgs().train_iters = 3


def test_help_shows_every_flag_with_its_default_and_fits_the_width():
    text = help_text(TrainingArgs, "usage", width=100)
    for entry in FLAGS.values():
        assert f"--{entry.name}" in text or f"--[no-]{entry.name}" in text
        assert entry.meta["help"] and not entry.meta["help"].endswith(".")
    assert "default: 150000" in text and "--model, --model-name" in text
    assert max(map(len, text.splitlines())) <= 100


def test_profile_range():
    assert profile_range("10:12") == (10, 12)


def test_a_switch_may_be_unset():
    @dataclasses.dataclass(frozen=True)
    class Args:
        wide: bool | None = group("Group")(None, "Whether it is wide")

    entry = flags_of(Args)[0]
    assert entry.is_bool and entry.shown_default == "unset"
    assert [parse(Args, argv).flags for argv in (["--wide"], ["--no-wide"], ["--wide=none"], [])] == [
        {"wide": True}, {"wide": False}, {"wide": None}, {},
    ]  # fmt: skip
    assert "--[no-]wide" in help_text(Args, "usage")
