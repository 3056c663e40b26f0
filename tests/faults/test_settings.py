"""Flags and settings that cannot be: each is refused in one sentence that names it, before a model is built."""

from __future__ import annotations

import pytest

SETTINGS = {
    "model.language.width=0": "model.language.width is 0: it must be at least 1.",
    "model.num_images=0": "model.num_images is 0: it must be at least 1",
    "model.vision.depth=-1": "model.vision.depth is -1: it must be at least 1 and at most 1000.",
    "model.expert.mlp_dim=100000000": "model.expert.mlp_dim is 100000000: it must be at most 1048576.",
    "model.vision.patch_size=0": "model.vision.patch_size is 0: it must be at least 1.",
    "model.vision.eps=0": "model.vision.eps is 0.0: it must be above 0.",
    "model.time_alpha=-1": "model.time_alpha is -1.0: it must be above 0.",
    "model.max_token_len=1": "no room for a word",
    "model.action_horizon=2.5": "it must be an integer",
    "model.language.width=wide": "it must be an integer",
    "model.vision.num_heads=5": "num_heads (5) does not divide",
    "model.vocab_size=700": "model.vocab_size is 700",
    "data.fps=-3": "data.fps is -3.0: it must be above 0.",
    "data.image_size=0": "data.image_size is 0: it must be at least 1",
    "data.image_size=1000000": "at most 8192",
    "data.action_keep=-1": "data.action_keep is -1: it must be at least 0.",
    "data.image_layout=0": "it must be one of hwc, chw or none",
    "model.min_period=5": "it must be below max_period",
    "model.model_type=xvla": "model.model_type is 'xvla', but --model is pi05",
    "data.cameras.base_0_rgb=": "data.cameras.base_0_rgb is ''",
    "data.normalization_mode=q95": "q95",
    "model.vision.depht=1": "did you mean 'model.vision.depth'?",
    "modl.x=1": "a setting starts with 'model.' or 'data.'",
}
FLAGS = {
    "--train-iters 99999999999999999999": "--train-iters is 99999999999999999999: it must be within 64 bits.",
    "--seed 9223372036854775808": "--seed",
    "--num-workers 100000": "--num-workers is 100000, more processes than this machine",
    "--nproc 100000": "--nproc is 100000, more processes than this machine",
    "--per-device-batch-size 1000000000000": "The run cannot fit",
    "--lr-base nan": "--lr-base is 'nan': it must be a number.",
    "--adam-beta1 1": "below 1",
    "--clip-grad inf": "--clip-grad is 'inf'",
    "--episodes 0-99999999999": "larger than any dataset's",
    "--lora-r 100000 --use-lora": "--lora-r is 100000",
    "--use-lora --lora-target-modules nothing": "--lora-target-modules",
    "--freeze-modules visoin": "did you mean vision",
    "--freeze-modules *": "Nothing to train",
    "--lr-group vision=fast": "--lr-group",
    "hello": "'hello' is neither a flag nor a setting: flags start with '--', settings read 'model.x=1'.",
    "--hello": "Unknown flag '--hello'",
    "--train-iters": "--train-iters needs a value",
    "--compile maybe": "'maybe' is neither",
    "--dataset-format hdf5_datasets": "holds no HDF5 file",
    "--trainer-options x=1": "Unknown trainer option 'x'",
    "--device cuda:77": "cuda:77",
    "--optimizer Adm": "did you mean Adam",
    "--dataset-path lerobot/pusht": "Without a network, copy it to this machine and give its path.",
    "--pretrained-checkpoint lerobot/pi05_base": "'lerobot/pi05_base' does not exist",
    "--export lerobot": "checkpoint",
}


FAMILIES = {
    "xvla model.num_heads=7": "A model with these settings of model.* cannot compute a loss",
    "xvla model.vision.dims=1": "model.vision.depths has 4 entries and model.vision.dims 1: both have one for each",
    "xvla model.vision.strides=0,0,0,0": "The numbers of model do not go together",
    "xvla data.domain=libreo": "did you mean 'libero'?",
    "groot_n1_7 model.text.heads=3": "cannot compute a loss",
    "groot_n1_7 model.vl_self_attention.layers=100000": "at most 1000",
    "groot_n1_6 data.embodiment_tag=gr2": "did you mean 'gr1'?",
    "groot_n1_6 data.action_steps=0": "data.action_steps is 0: it must be at least 1.",
    "fastwam model.patch=0,1,1": "model.patch is 0,1,1: it must be at least 1.",
    "fastwam model.vae.dtype=fp8": "model.vae.dtype is 'fp8'",
    "fastwam model.vae.dim_mult=0": "model.vae.dim_mult is 0: it must be at least 1.",
    "fastwam data.delta_dims=99": "data.delta_dims names dimension 99; the actions have 4.",
    "fastwam data.prompt=hello": "it must hold {task}",
}


@pytest.mark.parametrize("case", FAMILIES)
def test_other_families(refused, case):
    family, setting = case.split(" ")
    assert FAMILIES[case] in refused(setting, family=family)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(refused, setting):
    assert SETTINGS[setting] in refused(setting)


@pytest.mark.parametrize("flags", FLAGS)
def test_flags(refused, flags):
    assert FLAGS[flags] in refused(*flags.split())


def test_a_dimension_that_actions_lack(refused):
    said = refused("data.action_mode=relative", "data.action_keep=9")
    assert said == "data.action_keep names dimension 9; the actions have 4."


def test_another_column_has_statistics_of_its_own(noted):
    """The dataset's own statistics of its actions say nothing of a column that is chosen instead."""
    said = noted("data.action_key=timestamp", "data.state_key=action")
    assert "action and state   1 and 4 dimensions" in said and "All checks passed" in said


def test_a_model_larger_than_the_machine(refused):
    wide = [f"model.{tower}=100000" for tower in ("language.width", "language.mlp_dim", "expert.width")]
    said = refused(*wide, "--dtype", "bfloat16")
    assert "The run cannot fit: weights, gradients and optimiser take" in said and "--use-lora" in said


def test_what_was_set_in_vain_or_hardly_meant_is_said(noted):
    """Everything at once: none of it stops a run, and none of it is silent."""
    said = noted(
        "data.cameras.base_0_rgb=scene", "data.cameras.left_wrist_0_rgb=scene", "data.fps=3", "model.max_token_len=12",
        "--loss-log-rank", "5", "--robot-type", "foo", "--hsdp-shard-size", "2", "model.action_horizon=100",
        "--zero-parameters-as-bucket-view", "--lora-r", "4", "--num-samples", "3",
    )  # fmt: skip
    for words in (
        "Camera 'scene' fills 2 slots (base_0_rgb, left_wrist_0_rgb)",
        "data.fps has no effect here",
        "Prompts of more than 12 tokens lose their end, 'Action:' included: 3 of 3 tasks have such. Raise "
        "model.max_token_len to 22, which the longest needs: 'open the door with a revolving joint'.",
        "--loss-log-rank has no effect here: it belongs to a job that has those ranks",
        "--robot-type has no effect here: pi05 treats all robots alike.",
        "--hsdp-shard-size has no effect here: it belongs to several ranks",
        "--zero-parameters-as-bucket-view has no effect here",
        "model.action_horizon is 100, but no episode has more than 91 frames",
        "--lora-r has no effect here: it belongs to --use-lora.",
        "--num-samples has no effect here",
    ):
        assert words in said, words


@pytest.mark.parametrize("family, setting, needed", [
    ("pi05", "model.max_token_len", 22), ("xvla", "model.max_token_len", 11), ("fastwam", "model.text_tokens", 59),
    ("groot_n1_6", "model.max_token_len", 101), ("groot_n1_7", "model.max_token_len", 51),
])  # fmt: skip
def test_every_task_is_read_to_its_end_or_named(forge, family, setting, needed):
    """Not only that of the first sample, which is a short one; of other episodes than the chosen ones none."""
    longest = "'open the door with a revolving joint'"
    cut = forge("--dry-run", f"{setting}={needed - 1}", family=family).out
    assert f"1 of 3 tasks have such. Raise {setting} to {needed}, which the longest needs: {longest}." in cut
    assert "tasks have such" not in forge("--dry-run", f"{setting}={needed}", family=family).out
    short = forge("--dry-run", f"{setting}={needed - 1}", "--episodes", "0:4", family=family)
    assert short.code == 0 and "tasks have such" not in short.out


def test_ranks_of_a_job_are_known(noted, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    said = noted("--loss-log-rank", "5", "--hsdp-shard-size", "2", "--distributed-strategy", "fsdp")
    assert "no effect" not in said
