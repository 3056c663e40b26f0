"""Recorded samples → π0.5's fields: published preprocessing, cameras, prompts, masks, and actions back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from vlaforge.data.cameras import assign_cameras
from vlaforge.data.collate import collate
from vlaforge.data.dataset import Camera
from vlaforge.data.errors import UserError
from vlaforge.data.images import resize_with_pad_pil
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import sample_rng
from vlaforge.data.tokenizer import Tokenizer
from vlaforge.data.transforms import Compose, ResizeWithPad
from vlaforge.models import family
from vlaforge.models.blocks.image import PrepareImages
from vlaforge.models.pi05.config import DataConfig
from vlaforge.models.pi05.processing import Processing, discretise, prompt
from vlaforge.models.tokenizers.make_tiny import make
from vlaforge.runtime.config import resolve

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05"
CASES = json.loads((GOLDEN / "preproc.json").read_text())
TENSORS = load_file(GOLDEN / "preproc.safetensors")


@pytest.fixture(scope="module")
def tiny():
    return resolve(["--model", "pi05", "--preset", "tiny"])


@pytest.fixture(scope="module")
def dataset(metaworld):
    return open_dataset(metaworld)


@pytest.fixture(scope="module")
def parts(tiny, dataset):
    """What a Processing is made of: configs, normalisers, tokenizer, dataset info."""
    normalizers = NormalizerSet.from_statistics(dataset.stored_statistics(), {"action": "min_max", "state": "min_max"})
    model = replace(tiny.model_config, action_dim=4, state_dim=4)
    return model, tiny.data_config, normalizers, Tokenizer(tiny.args.tokenizer_path, bos=True, pad_id=0), dataset.info


@pytest.fixture
def build(parts):
    def build(info=None, model=None, **data) -> Processing:
        config, defaults, normalizers, tokenizer, own = parts
        return Processing(
            replace(config, **(model or {})), replace(defaults, **data), normalizers, tokenizer, info or own
        )

    return build


@pytest.fixture(scope="module")
def sample(dataset, parts):
    return dataset.get(85, Processing(*parts).needs())  # six frames before the end of episode 0


# ------------------------------------------------------------------------------------------- published numbers


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["name"])
def test_images_of_both_recipes(case):
    name, size = case["name"], case["target"]
    raw = TENSORS[f"{name}.uint8_hwc"]
    lerobot = PrepareImages(size)(torch.from_numpy(raw)[None, None])[0]
    np.testing.assert_allclose(lerobot.numpy(), TENSORS[f"{name}.lerobot_model_input_chw"], atol=1e-6)
    openpi = resize_with_pad_pil(raw, size, size)
    np.testing.assert_array_equal(openpi, TENSORS[f"{name}.openpi_pil_data_transform_hwc"])


def test_prompts_are_the_published_ones():
    states = TENSORS["prompt.state"]
    assert [prompt(t, s) for t, s in zip(CASES["prompt"]["tasks"], states)] == CASES["prompt"]["prompts"]


def test_state_bins_at_their_edges():
    edges = np.array(
        [-1.0001, -1.0, np.nextafter(np.float32(-1 + 2 / 256), -2, dtype=np.float32), -1 + 2 / 256, 0.0, 5.0]
    )
    assert discretise(edges.astype(np.float32)).tolist() == [-1, 0, 0, 1, 128, 255]


def test_prompt_without_state_has_the_older_form():
    assert prompt(" pick_up\nit ", None) == "pick up it\n"


def test_tiny_tokenizer_is_what_its_script_makes(parts):
    tokenizer = parts[3]
    assert json.loads(tokenizer.path.read_text()) == json.loads(make().to_str())
    assert tokenizer.bos_id == 2 and tokenizer.pad_id == 0
    assert all(len(tokenizer.ids(f" {bin}")) == 2 for bin in range(-1, 256))  # <bos>, and one token for the bin
    text = "Task: Kaffee für 3 Leute kochen ☕, State: -1 7;\nAction: "
    assert tokenizer.decode(tokenizer.ids(text)[1:]) == text


# ------------------------------------------------------------------------------------------- samples


def test_a_recorded_sample_becomes_the_contract_fields(build, parts, sample):
    processing = build()
    fields = processing.sample(sample, sample_rng(0, 0, 85, "augment"), True)
    model = parts[0]
    batch = collate([fields, fields], family("pi05").model.contract(model))
    assert batch["images"].shape == (2, 2, 128, 128, 3)  # raw: the device resizes
    assert np.array_equal(fields["images"][0], sample["observation.images.scene"])
    assert batch["actions"].shape == (2, 16, 8) and not batch["actions"][..., 4:].any()
    assert batch["action_mask"].sum() == 2 * 6 * 4 and batch["action_mask"][0, :6, :4].all()
    assert batch["tokens"].shape[1] % 8 == 0
    text = processing.tokenizer.decode(fields["tokens"][fields["token_mask"]])
    state = processing.normalizers.normalize("state", sample["observation.state"])
    assert text == f"<bos>Task: {sample['task']}, State: {' '.join(map(str, discretise(state)))};\nAction: "


def test_actions_come_back_in_robot_units(build, sample):
    processing = build()
    fields = processing.sample(sample, sample_rng(0, 0, 85, "augment"), False)
    np.testing.assert_allclose(processing.actions(fields["actions"]), sample["action"], atol=1e-5)


@pytest.mark.parametrize("data, dims, steps", [
    ({}, 4, 6),
    ({"pad_steps": "train"}, 4, 16),
    ({"loss_dims": "all"}, 8, 6),
    ({"loss_dims": "all", "pad_steps": "train"}, 8, 16),
])  # fmt: skip
def test_what_the_loss_counts_is_a_choice(build, sample, data, dims, steps):
    mask = build(**data).sample(sample, sample_rng(0, 0, 85, "augment"), True)["action_mask"]
    assert mask.sum() == dims * steps and mask[:steps, :dims].all()


def test_recipes_set_what_the_two_implementations_do(dataset):
    openpi, lerobot = (resolve(["--model", "pi05", "--recipe", name]) for name in ("openpi", "lerobot"))
    assert (openpi.data_config.loss_dims, lerobot.data_config.loss_dims) == ("all", "real")
    assert openpi.data_config.image_antialias and not lerobot.data_config.image_antialias
    assert openpi.data_config.pad_steps == lerobot.data_config.pad_steps == "train"
    assert (openpi.args.weight_decay, lerobot.args.weight_decay) == (1e-10, 0.01)
    assert DataConfig().pad_steps == "mask"  # ours


def test_antialiasing_happens_in_the_workers(build, sample):
    images = build(image_antialias=True).observe(sample)["images"]
    assert images.shape == (2, 64, 64, 3)
    assert np.array_equal(images[0], resize_with_pad_pil(sample["observation.images.scene"], 64, 64))


def test_resizing_in_the_workers_rounds_what_the_device_would_compute(build, sample):
    prepare = PrepareImages(64)
    device, worker = (torch.from_numpy(build(resize_on_device=on).observe(sample)["images"]) for on in (True, False))
    assert device.shape[1] == 128 and worker.shape[1] == 64
    assert (prepare(device[None]) - prepare(worker[None])).abs().max() <= 1.01 / 255


def test_augmentation_is_a_function_of_the_sample_and_for_training_only(build, sample):
    processing = build(image_augment=True)

    def seen(index: int, training: bool) -> torch.Tensor:
        """What the model sees: the batch's frames, placed by the device."""
        fields = processing.sample(sample, sample_rng(0, 0, index, "augment"), training)
        assert ("placements" in fields) == training
        given = {name: torch.from_numpy(value)[None] for name, value in fields.items()}
        return PrepareImages(64)(given["images"], placements=given.get("placements"))

    assert torch.equal(seen(1, True), seen(1, True)) and not torch.equal(seen(1, True), seen(2, True))
    assert torch.equal(seen(1, False), seen(2, False))
    assert 0.02 < (seen(1, True) - seen(1, False)).abs().mean() < 0.5


@pytest.mark.parametrize("antialias", [False, True])
def test_augmentation_travels_in_the_batch(build, parts, sample, antialias):
    processing, model = build(image_augment=True, image_antialias=antialias), parts[0]
    fields = [processing.sample(sample, sample_rng(0, 0, i, "augment"), True) for i in range(2)]
    batch = collate(fields, family("pi05").model.contract(model))
    assert batch["placements"].shape == (2, 2, 16) and batch["images"].shape[2] == (64 if antialias else 128)
    wrist, colour_only = processing.slots[1], batch["placements"][0, 1]
    assert "wrist" in wrist
    plain = Compose((ResizeWithPad(64, 64),)).place(tuple(batch["images"].shape[2:4])).vector()
    assert np.array_equal(colour_only[:12].numpy(), plain[:12]) and not np.array_equal(colour_only.numpy(), plain)


# ------------------------------------------------------------------------------------------- cameras


def test_cameras_fill_slots_by_order_or_by_name(parts, build, sample):
    info = parts[-1]
    assert assign_cameras({}, info, 2) == ("scene", "wrist")
    assert assign_cameras({}, info, 3) == ("scene", "wrist", None)
    named = {"base_0_rgb": "wrist"}
    assert assign_cameras(named, info, 2) == ("wrist", None)
    fields = build(cameras=named).observe(sample)
    assert fields["image_mask"].tolist() == [True, False]
    assert not fields["images"][1].any() and np.array_equal(fields["images"][0], sample["observation.images.wrist"])
    assert build(cameras=named).needs().cameras == ("wrist",)
    assert build(num_images=1, cameras=named).observe(sample)["images"].shape[0] == 1
    assert build(image_mask=(False, True)).observe(sample)["image_mask"].tolist() == [False, True]


def test_a_camera_missing_from_an_observation_is_masked(build, sample):
    obs = {key: value for key, value in sample.items() if key != "observation.images.scene"}
    fields = build().observe(obs)
    assert fields["image_mask"].tolist() == [False, True] and not fields["images"][0].any()
    with pytest.raises(UserError, match="none of the cameras"):
        build().observe({"task": "x", "observation.state": obs["observation.state"]})


def test_cameras_of_several_sizes_are_brought_to_one(build, parts, sample):
    info = parts[-1]
    cameras = {"scene": Camera("scene", 128, 128), "wrist": Camera("wrist", 96, 128)}
    obs = {**sample, "observation.images.wrist": sample["observation.images.wrist"][:96]}
    fields = build(info=replace(info, cameras=cameras)).observe(obs)
    assert fields["images"].shape == (2, 64, 64, 3)


@pytest.mark.parametrize("arguments, message", [
    ({"cameras": {"base_0_rbg": "scene"}}, "did you mean 'base_0_rgb'"),
    ({"cameras": {"base_0_rgb": "scenes"}}, "did you mean 'scene'"),
    ({"num_images": 1}, "2 cameras .* for 1 slots"),
    ({"num_images": 5}, "the model has 2 camera slots"),
    ({"image_mask": (True,)}, "1 entries for 2 camera slots"),
    ({"image_mask": (False, False)}, "No camera is left"),
    ({"image_size": 224}, "set both alike"),
    ({"max_token_len": 100}, "more than model.max_token_len"),
    ({"model": {"vocab_size": 500}}, "give this model's tokenizer"),
    ({"model": {"max_action_dim": 3, "action_dim": None}}, "more than model.max_action_dim"),
])  # fmt: skip
def test_what_does_not_fit_is_said_at_once(build, arguments, message):
    with pytest.raises(UserError, match=message):
        build(**arguments)


def test_the_state_is_needed_only_where_it_is_read(build, sample):
    stateless = {key: value for key, value in sample.items() if key != "observation.state"}
    with pytest.raises(UserError, match="discrete_state_input=false"):
        build().observe(stateless)
    tokens = build(discrete_state_input=False).observe(stateless)
    text = build().tokenizer.decode(tokens["tokens"][tokens["token_mask"]])
    assert text == f"<bos>{sample['task']}\n"


def test_a_prompt_that_is_cut_is_reported_once(build, sample):
    processing = build(max_token_len=8)
    with pytest.warns(UserWarning, match="more than 8 lose their end") as caught:
        for _ in range(3):
            assert processing.observe(sample)["token_mask"].all()
    assert len(caught) == 1
