"""X-VLA: the official numbers, full-size inventory, layouts, preprocessing, dropout, data of both formats."""

from __future__ import annotations

import json
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlaforge.data.collate import collate
from vlaforge.data.dataset import Camera
from vlaforge.data.errors import UserError
from vlaforge.data.normalize import Normalizer, NormalizerSet
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import Batch, sample_rng
from vlaforge.data.tokenizer import Tokenizer
from vlaforge.models import family
from vlaforge.models.blocks.image import NormalizeImages
from vlaforge.models.convert import load_official, read_safetensors
from vlaforge.models.golden import Folder
from vlaforge.models.xvla.actions import action_space
from vlaforge.models.xvla.config import DataConfig, ModelConfig
from vlaforge.models.xvla.convert import LAYOUTS
from vlaforge.models.xvla.golden import Golden
from vlaforge.models.xvla.model import Model
from vlaforge.models.xvla.processing import Processing
from vlaforge.runtime.config import resolve
from vlaforge.runtime.parity import compare, table

GOLDEN = Path(__file__).parents[1] / "golden" / "xvla"
PREPROC = load_file(GOLDEN / "preproc.safetensors")


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden(Folder.read(GOLDEN))


@pytest.fixture(scope="module")
def model(golden) -> Model:
    model = golden.model()
    golden.load(model)
    return model


@pytest.fixture(scope="module")
def full_size() -> Model:
    with torch.device("meta"):
        return Model(ModelConfig())


def test_it_has_the_official_numbers():
    report = compare(family("xvla"), GOLDEN)
    assert report.passed, table(report)
    assert report.last_line() == "parity xvla: 300 of 300 within tolerance"


# ------------------------------------------------------------------------------------------- full size and layouts


def test_full_size_has_the_official_parameter_count(full_size):
    assert sum(p.numel() for p in full_size.parameters()) == 879_482_456
    assert sum(p.numel() for p in full_size.vision.parameters()) == 360_632_320
    assert sum(p.numel() for p in full_size.projector.parameters()) == 2_201_600


@pytest.mark.parametrize("layout, prefix", [("original", ""), ("lerobot_original", "model.")])
def test_full_size_writes_exactly_the_official_keys(full_size, layout, prefix):
    listed = [line.split("\t") for line in (GOLDEN / "full_size_keys.txt").read_text().splitlines()]
    expected = {prefix + key: literal_eval(shape) for key, shape in listed}
    # An alias of `shared`, which published files leave out.
    del expected[f"{prefix}vlm.language_model.model.encoder.embed_tokens.weight"]
    saved = LAYOUTS[layout].save(full_size.state_dict())
    assert {key: tuple(value.shape) for key, value in saved.items()} == expected


@pytest.mark.parametrize("file, layout", [("weights", "original"), ("weights_lerobot_native", "lerobot")])
def test_recorded_files_load_and_come_back(golden, model, file, layout):
    official = read_safetensors(GOLDEN / f"{file}.safetensors")
    other = golden.model()
    assert load_official(other, LAYOUTS, official).layout == layout
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values()))
    saved = LAYOUTS[layout].save(other.state_dict())
    assert set(official) - set(saved) <= {f"{LAYOUTS[layout].prefix}vlm.language_model.final_logits_bias"}
    assert all(torch.equal(saved[key], official[key]) for key in saved)


def test_names_of_both_layouts_agree_with_lerobots_own_map():
    pairs = json.loads((GOLDEN / "key_map_lerobot_native_to_official.json").read_text())
    for native, official in pairs.items():
        theirs = official.removesuffix(" (transposed)")
        assert LAYOUTS["lerobot"].ours(native) == LAYOUTS["original"].ours(theirs) is not None, native


# ------------------------------------------------------------------------------------------- the model


def test_dropout_is_a_function_of_the_samples_seeds(golden):
    model = golden.model()
    golden.load(model)
    model.train()
    batch, draw = golden.inputs()

    def loss(*seeds: int) -> float:
        draw["dropout"] = torch.tensor(seeds)
        return model(batch, draw).total().item()

    assert loss(3, 2**40) == loss(3, 2**40) != loss(4, 2**40)
    assert loss(3, 2**40) != model.eval()(batch, draw).total().item()


def test_a_frozen_tower_runs_ahead_with_the_same_loss(golden):
    model = golden.model()
    golden.load(model)
    batch, draw = golden.inputs()
    assert model.encode_frozen(batch) is batch
    plain = model(batch, draw).total()
    for part in (model.vision, model.projector, model.language):
        part.requires_grad_(False)
    ahead = model.encode_frozen(batch)
    assert "images" not in ahead and "tokens" not in ahead and not ahead["text_features"].requires_grad
    assert torch.equal(model(ahead, draw).total(), model(batch, draw).total())
    torch.testing.assert_close(model(ahead, draw).total(), plain, atol=0, rtol=1e-5)
    assert torch.equal(model.act(ahead, draw, 2), model.act(batch, draw, 2))


def test_views_that_no_sample_has_leave_the_batch(golden, model):
    batch, draw = golden.inputs()
    batch["image_mask"][:, 2] = False
    short = Batch(batch, images=batch["images"][:, :2])
    torch.testing.assert_close(model(short, draw).total(), model(batch, draw).total(), atol=0, rtol=1e-6)


SPACES = load_file(GOLDEN / "action_spaces.safetensors")


@pytest.mark.parametrize("mode", sorted({name.split(".")[0] for name in SPACES}))
def test_action_spaces_are_the_official_ones(mode):
    given = {name.split(".", 1)[1]: value for name, value in SPACES.items() if name.split(".")[0] == mode}
    space = action_space(mode, real_dim=9, max_dim=20)
    mask = torch.ones_like(given["target"], dtype=torch.bool)
    for name, term in space.losses(given["pred"], given["target"], mask).items():
        mean = term.weight * term.sum / term.count
        torch.testing.assert_close(mean, given[f"loss.{name}"], atol=1e-4, rtol=1e-5)
    assert {name for name in given if name.startswith("loss.")} == {f"loss.{term.name}" for term in space.terms}
    finished, post = space.finish(given["pred"]), given["post"]
    torch.testing.assert_close(finished[..., : post.shape[-1]], post, atol=1e-6, rtol=1e-6)
    hidden = torch.where(space.shown(given["proprio"].shape[-1]), given["proprio"], torch.zeros(()))
    assert torch.equal(hidden, given["pre.proprio"])


# ------------------------------------------------------------------------------------------- preprocessing


@pytest.mark.parametrize("name", ["img0", "img1", "img2"])
def test_images_are_normalised_and_padded_as_officially(name):
    raw = PREPROC[f"{name}.uint8_chw"].permute(0, 2, 3, 1)[:, None]
    padded = PREPROC[f"{name}.resize_with_pad_lefttop_pad0"]
    ours = NormalizeImages(tuple(padded.shape[-2:]), fit="pad_left_top")(raw)
    torch.testing.assert_close(ours, padded, atol=2e-5, rtol=1e-5)
    plain = PREPROC[f"{name}.imagenet_normalized"]
    torch.testing.assert_close(NormalizeImages(tuple(plain.shape[-2:]))(raw), plain, atol=2e-6, rtol=1e-6)
    assert torch.equal(NormalizeImages(tuple(plain.shape[-2:]))(plain[:, None]), plain)


@pytest.fixture(scope="module")
def parts(metaworld):
    tiny = resolve(["--model", "xvla", "--preset", "tiny"])
    dataset = open_dataset(metaworld)
    normalizers = NormalizerSet.from_statistics(dataset.stored_statistics(), {"action": "min_max", "state": "min_max"})
    tokenizer = Tokenizer(tiny.args.tokenizer_path, **Processing.tokenizer_options)
    model = replace(tiny.model_config, action_dim=4, state_dim=4)
    return model, tiny.data_config, normalizers, tokenizer, dataset


@pytest.fixture
def build(parts):
    model, data, normalizers, tokenizer, dataset = parts

    def build(info=None, model_changes=(), **changes) -> Processing:
        config = replace(model, **dict(model_changes))
        return Processing(config, replace(data, **changes), normalizers, tokenizer, info or dataset.info)

    return build


@pytest.fixture(scope="module")
def sample(parts):
    model, data, normalizers, tokenizer, dataset = parts
    return dataset.get(85, Processing(model, data, normalizers, tokenizer, dataset.info).needs())


def test_a_recorded_sample_becomes_the_contract_fields(build, parts, sample):
    processing = build()
    fields = processing.sample(sample, sample_rng(0, 0, 85, "augment"), True)
    batch = collate([fields, fields], Model.contract(parts[0]))
    assert batch["images"].shape == (2, 2, 128, 128, 3) and batch["images"].dtype == torch.uint8
    assert np.array_equal(fields["images"][0], sample["observation.images.scene"])
    text = processing.tokenizer.decode([i for i in fields["tokens"] if i != processing.tokenizer.pad_id])
    assert text == f"<bos>{sample['task']}<eos>"
    assert batch["action_mask"].sum() == 2 * 6 * 4  # six frames before the end of the episode
    assert batch["state"].shape == (2, 8) and not batch["state"][:, 4:].any()
    np.testing.assert_allclose(processing.actions(fields["actions"]), sample["action"], atol=1e-5)
    assert build(pad_actions="train").sample(sample, sample_rng(0, 0, 0, "a"), True)["action_mask"].all()


def test_a_long_prompt_keeps_its_end_mark(build, sample):
    obs = {**sample, "task": "press the red button " * 9}
    with pytest.warns(UserWarning, match="more than 6 lose their end: raise model.max_token_len"):
        tokens = build(model_changes={"max_token_len": 6}).observe(obs)["tokens"]
    assert tokens.shape == (6,) and tokens[0] == 2 and tokens[-1] == 1


def test_empty_slots_stand_last_and_missing_views_are_masked(build, sample):
    processing = build(cameras={"left_wrist_0_rgb": "wrist"})
    fields = processing.observe(sample)
    assert fields["image_mask"].tolist() == [True, False] and not fields["images"][1].any()
    assert np.array_equal(fields["images"][0], sample["observation.images.wrist"])
    obs = {key: value for key, value in sample.items() if key != "observation.images.wrist"}
    assert build().observe(obs)["image_mask"].tolist() == [True, False]


def test_cameras_of_several_sizes_are_resized_before_they_travel(build, parts, sample):
    cameras = {"scene": Camera("scene", 128, 128), "wrist": Camera("wrist", 96, 128)}
    obs = {**sample, "observation.images.wrist": sample["observation.images.wrist"][:96]}
    ours = build(info=replace(parts[-1].info, cameras=cameras)).observe(obs)["images"]
    assert ours.shape == (2, 64, 64, 3)
    prepare = NormalizeImages((64, 64))
    raw = torch.from_numpy(sample["observation.images.scene"])[None, None]
    apart = (prepare(torch.from_numpy(ours[:1])[None]) - prepare(raw)).abs().max()
    assert apart <= 0.51 / 255 / 0.22


@pytest.mark.parametrize("domain, robot, number", [("rt1", None, 1), ("3", "bridge", 3), (None, "RT1", 1),
                                                   (None, "my_arm", 0), (None, "airbot", 0)])  # fmt: skip
def test_the_domain_is_set_or_follows_the_robot(build, parts, sample, domain, robot, number):
    """The tiny model has four domains: a robot type beyond them counts as any other."""
    processing = build(info=replace(parts[-1].info, robot_type=robot), domain=domain)
    assert processing.observe(sample)["embodiment"] == number


@pytest.mark.parametrize("changes, message", [
    ({"domain": "brige"}, "did you mean 'bridge'"),
    ({"domain": "airbot"}, "the model has 4 domains"),
    ({"image_size": 32}, "set both alike"),
    ({"model_changes": {"action_mode": "ee6d", "max_action_dim": 20}}, "reads the gripper as 0 or 1"),
    ({"model_changes": {"action_mode": "ee6d", "max_action_dim": 20}, "normalization_mode": "identity",
      "pad_actions": "keep"}, "allowed are mask and train"),
    ({"cameras": {"base_0_rgb": "scenes"}}, "did you mean 'scene'"),
])  # fmt: skip
def test_what_does_not_fit_is_said_at_once(build, changes, message):
    with pytest.raises(UserError, match=message):
        build(**changes)


def test_the_vision_towers_lists_have_one_entry_a_stage():
    with pytest.raises(UserError, match=r"model\.vision\.depths has 3 entries and model\.vision\.dims 4"):
        resolve(["--model", "xvla", "model.vision.depths=[1,1,9]"])


def test_agilex_recordings_are_end_effector_poses_without_conversion(root, parts):
    dataset = open_dataset(root / "tests/samples/metaworld_agilex_hdf5", format="hdf5_datasets")
    tokenizer = parts[3]
    text = replace(ModelConfig().text, vocab_size=1024, pad_token=tokenizer.pad_id)
    model = ModelConfig(text=text, image_size=64, action_horizon=8)
    identity = NormalizerSet.single(action=Normalizer("identity"), state=Normalizer("identity"))
    processing = Processing(model, DataConfig(image_size=64), identity, tokenizer, dataset.info)
    sample = dataset.get(0, processing.needs())
    fields = processing.sample(sample, sample_rng(0, 0, 0, "augment"), True)
    assert fields["actions"].shape == (8, 20) and fields["action_mask"].all()
    assert fields["embodiment"] == 10  # AIR-AGILEX
    grippers = fields["actions"][:, [9, 19]]
    assert grippers.min() >= 0.0 and grippers.max() <= 1.0
    np.testing.assert_array_equal(processing.actions(fields["actions"]), sample["action"])
    collate([fields], Model.contract(model))
