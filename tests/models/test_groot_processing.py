"""GR00T N1.6 and N1.7 on the data side: official images, packing and prompts, augmentation, official files, faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from vlaforge.data.collate import collate
from vlaforge.data.errors import UserError
from vlaforge.data.normalize import Normalizer, NormalizerSet
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import sample_rng
from vlaforge.data.tokenizer import Tokenizer
from vlaforge.models import family
from vlaforge.models.groot.images import ImageTransform, formalize, turn_black, turn_mirrored
from vlaforge.models.groot.processing import GrootProcessing
from vlaforge.runtime.config import resolve

GOLDENS = Path(__file__).parents[1] / "golden"
FAMILIES = ("groot_n1_6", "groot_n1_7")
PREPROC = load_file(GOLDENS / "groot_n1_7" / "preproc.safetensors")
CASES = json.loads((GOLDENS / "groot_n1_7" / "preproc.json").read_text())


@pytest.fixture(scope="module", params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("number", range(3))
def test_images_are_the_official_ones_byte_for_byte(number):
    case = CASES["image_cases"][number]
    target = case["image_target_size"][0]
    crop = case["crop_fraction"] or case["image_crop_size"][0] / target
    settings = {"crop": crop, "letter_box": case.get("letter_box_transform", False)}
    frame = PREPROC[f"img{number}.uint8_chw"].permute(1, 2, 0).numpy()
    squares = ImageTransform((target, target), case["shortest_image_edge"], **settings)
    assert np.array_equal(squares(frame), PREPROC[f"img{number}.torch_path"].permute(1, 2, 0).numpy())
    recorded = PREPROC[f"img{number}.albumentations_path_hwc"].numpy()
    areas = ImageTransform(recorded.shape[:2], case["shortest_image_edge"] or target, path="albumentations", **settings)
    assert np.array_equal(areas(frame), recorded)


TURNS = load_file(GOLDENS / "groot_n1_7" / "turns.safetensors")


@pytest.mark.parametrize("recorded", sorted(TURNS.keys() - {"frame"}))
def test_turned_images_are_the_official_ones(recorded):
    """Pixel for pixel torchvision's; Albumentations' within the rounding of OpenCV, which differs between versions."""
    library, _, degrees = recorded.partition(".")
    turn, apart = {"torchvision": (turn_black, 0), "albumentations": (turn_mirrored, 1)}[library]
    turned = turn(TURNS["frame"].numpy(), float(degrees)).astype(int)
    assert np.abs(turned - TURNS[recorded].numpy()).max() <= apart


def test_language_is_the_official_one():
    assert [formalize(text) for text in CASES["language"]["raw"]] == CASES["language"]["formalized"]


def test_embodiment_numbers_are_the_official_ones():
    assert CASES["n1_7_embodiment_mapping"] == family("groot_n1_7").part("config").EMBODIMENTS


@pytest.fixture(scope="module")
def parts(name, metaworld):
    resolved = resolve(["--model", name, "--preset", "tiny"])
    dataset = open_dataset(metaworld)
    normalizers = NormalizerSet.from_statistics(dataset.stored_statistics(), {"action": "min_max", "state": "min_max"})
    tokenizer = Tokenizer(resolved.args.tokenizer_path, **GrootProcessing.tokenizer_options)
    model = replace(resolved.model_config, action_dim=4, state_dim=4)
    return model, resolved.data_config, normalizers, tokenizer, dataset


@pytest.fixture
def build(name, parts):
    model, data, normalizers, tokenizer, dataset = parts

    def build(info=None, model_changes=(), norm=None, **changes) -> GrootProcessing:
        config = replace(model, **dict(model_changes))
        return family(name).processing(
            config, replace(data, **changes), norm or normalizers, tokenizer, info or dataset.info
        )

    return build


@pytest.fixture
def sample(build, parts):
    return parts[-1].get(85, build().needs())  # six frames before the end of episode 0


def test_states_and_actions_are_packed_as_officially(build, parts):
    """The recorded numbers: clipped to the range, a constant dimension 0, padded; steps beyond the end are masked."""
    low, high = (PREPROC[f"pack.{end}"].double().numpy() for end in ("min", "max"))
    width, horizon = PREPROC["pack.action"].shape[-1], PREPROC["pack.action"].shape[1]
    norm = NormalizerSet.single(action=Normalizer("min_max", low, high), state=Normalizer("min_max", low, high))
    changes = {"max_action_dim": width, "max_state_dim": PREPROC["pack.state"].shape[-1], "action_dim": 6}
    info = replace(parts[-1].info, action_dim=6, state_dim=6)
    processing = build(info, {**changes, "action_horizon": 7}, norm, action_steps=6)
    assert horizon == 8  # recorded with one step more than was read; it is padding
    frame = np.zeros((128, 128, 3), np.uint8)
    for row in range(3):
        sample = {
            "observation.images.scene": frame, "observation.images.wrist": frame, "task": "",
            "observation.state": PREPROC["pack.state_in"][row].numpy(),
            "action": PREPROC["pack.action_in"][row].numpy(),
            "action_is_pad": PREPROC["pack.action_is_pad"][row].numpy(),
        }  # fmt: skip
        fields = processing.sample(sample, sample_rng(0, 0, row, "augment"), True)
        mask = PREPROC["pack.action_mask"][row].numpy().astype(bool)[:7]
        assert np.array_equal(fields["action_mask"], mask)
        recorded = PREPROC["pack.action"][row].numpy()[:7]
        np.testing.assert_allclose(np.where(mask, fields["actions"], 0), np.where(mask, recorded, 0), atol=1e-6)
        np.testing.assert_allclose(fields["state"], PREPROC["pack.state"][row, 0].numpy(), atol=1e-6)


def test_a_recorded_sample_becomes_the_contract_fields(name, build, parts, sample):
    processing = build()
    fields = processing.sample(sample, sample_rng(0, 0, 85, "augment"), True)
    batch = collate([fields, fields], family(name).model.contract(parts[0]))
    assert batch["images"].shape == (2, 2, 64, 64, 3)
    assert batch["token_mask"][:, -1].all() and batch["token_mask"].all(0).sum() == batch["tokens"].shape[1]
    assert (batch["tokens"] == parts[0].image_token).sum(1).tolist() == [32, 32]
    assert batch["action_mask"].sum() == 2 * 6 * 4
    inside = np.abs(processing.codec.encode(sample)[0][:, :4]) <= 1
    back = processing.actions(fields["actions"])
    np.testing.assert_allclose(back[inside], sample["action"][inside], atol=1e-5)


PROMPTS = {
    "groot_n1_7": "<|im_start|>user\n<|vision_start|>{i}<|vision_end|><|vision_start|>{i}<|vision_end|>{t}<|im_end|>\n",
    "groot_n1_6": "<|im_start|>system\nYou are a helpful assistant.\n<|im_end|>\n<|im_start|>user\n{t}<image 1><img>{i}"
                  "</img><image 2><img>{i}</img><|im_end|>\n",
}  # fmt: skip


def test_prompts_are_the_published_templates(name, build, sample):
    processing = build()
    fields = processing.observe({**sample, "task": "Press the red-button!"})
    text = processing.tokenizer.decode(fields["tokens"][fields["token_mask"]])
    assert text == PROMPTS[name].format(i=processing.image_word * 16, t="press the redbutton")
    if name == "groot_n1_7":
        positions = fields["positions"][:, fields["token_mask"]]
        image = fields["tokens"][fields["token_mask"]] == processing.model.image_token
        first = positions[:, image][:, :16]
        assert np.ptp(first[0]) == 0 and np.ptp(first[1]) == np.ptp(first[2]) == 3


def test_a_long_task_loses_words_and_no_image(build, sample):
    room = build().observe({**sample, "task": ""})["token_mask"].sum() + 6
    processing = build(model_changes={"max_token_len": int(room)})
    with pytest.warns(UserWarning, match="lose words at the end of their task"):
        fields = processing.observe({**sample, "task": "press the red button " * 9})
    assert (fields["tokens"] == processing.model.image_token).sum() == 32


def test_augmentation_is_a_function_of_the_sample_and_for_training_only(build, sample):
    processing = build(image_augment=True)

    def images(index: int, training: bool) -> np.ndarray:
        return processing.sample(sample, sample_rng(0, 0, index, "augment"), training)["images"]

    assert np.array_equal(images(1, True), images(1, True)) and not np.array_equal(images(1, True), images(2, True))
    assert np.array_equal(images(1, False), images(2, False))


@pytest.mark.parametrize("path", ["torch", "albumentations"])
def test_rotation_is_drawn_from_the_samples_generator_and_alike_for_all_views(build, sample, path):
    plain = {"color_jitter": (0.0, 0.0, 0.0, 0.0), "image_path": path, "crop_fraction": None}
    processing = build(image_augment=True, random_rotation_angle=20.0, shortest_image_edge=64, **plain)
    both = {**sample, "observation.images.wrist": sample["observation.images.scene"]}

    def images(index: int, training: bool) -> np.ndarray:
        return processing.sample(both, sample_rng(0, 0, index, "augment"), training)["images"]

    one, rng = images(1, True), sample_rng(0, 0, 1, "augment")
    assert np.array_equal(one, images(1, True)) and np.array_equal(one[0], one[1])
    assert not np.array_equal(one, images(2, True)) and not np.array_equal(one, images(1, False))
    place = rng.random(), rng.random()
    turned = processing.transform(both["observation.images.scene"], place, rng.uniform(-20.0, 20.0))
    assert np.array_equal(one[0], turned)
    assert np.array_equal(build(**plain, shortest_image_edge=64).observe(both)["images"], images(1, False))


def test_official_files_win(name, build, sample, tmp_path):
    (tmp_path / "embodiment_id.json").write_text(json.dumps({"my_robot": 7}))
    kwargs = {"image_target_size": [64, 64], "image_crop_size": [48, 48], "formalize_language": False}
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_kwargs": kwargs}))
    processing = build(official_folder=str(tmp_path), embodiment_tag="my_robot")
    assert processing.observe(sample)["embodiment"] == processing.embodiment_of("") == 7
    named = processing.observe({**sample, "embodiment": "my_robot"})
    assert named["embodiment"] == processing.embodiment_of("my_robot")
    assert processing.transform == ImageTransform((64, 64), None, 0.75) and not processing.data.formalize_language
    with pytest.raises(UserError, match="my_robot"):
        build(official_folder=str(tmp_path), embodiment_tag="new_embodiment")
    assert processing.data.color_jitter == (0.3, 0.4, 0.5, 0.08)
    kwargs |= {"use_albumentations": True, "color_jitter_params": {"hue": 0.1}, "random_rotation_angle": 5}
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_kwargs": kwargs}))
    processing = build(official_folder=str(tmp_path), embodiment_tag="my_robot")
    assert processing.transform == ImageTransform((64, 64), 64, 0.75, path="albumentations")
    assert processing.data.color_jitter == (0.0, 0.0, 0.0, 0.1) and processing.data.random_rotation_angle == 5.0
    wide = {name: replace(camera, width=160) for name, camera in processing.info.cameras.items()}
    files = {"official_folder": str(tmp_path), "embodiment_tag": "my_robot"}
    with pytest.raises(UserError, match=r"128 × 160 becomes 64 × 80. Set model.image_size=64 model.image_width=80"):
        build(replace(processing.info, cameras=wide), **files)
    broad = build(replace(processing.info, cameras=wide), {"image_width": 80, "max_token_len": 160}, **files)
    assert broad.view_tokens == 4 * 5 and broad.transform.size == (64, 80)
    kwargs["shortest_image_edge"] = 100
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_kwargs": kwargs}))
    with pytest.raises(UserError, match="becomes 96 × 96"):
        build(official_folder=str(tmp_path), embodiment_tag="my_robot")


@pytest.mark.parametrize("changes, message", [
    ({"embodiment_tag": "new_embodyment"}, "did you mean 'new_embodiment'"),
    ({"embodiment_tag": "40"}, "is number 40"),
    ({"image_size": 32}, "set both alike"),
    ({"model_changes": {"num_views": 3}}, "set model.num_views=2"),
    ({"model_changes": {"num_views": 1}}, "2 cameras .* for 1 slots"),
    ({"model_changes": {"image_token": 5}}, "give this model's tokenizer"),
    ({"model_changes": {"max_token_len": 40}}, "without any text"),
    ({"action_steps": 17}, "between 1 and 16"),
    ({"crop_fraction": 1.5}, "above 0 and at most 1"),
    ({"sin_cos_embedding_keys": ("arm",)}, "sin_cos_embedding_keys 'arm': .* state"),
    ({"sin_cos_embedding_keys": ("state",), "model_changes": {"max_state_dim": 7}}, r"8 dimensions \(sines and"),
    ({"official_folder": "/nowhere"}, "not a folder"),
])  # fmt: skip
def test_what_does_not_fit_is_said_at_once(build, changes, message):
    with pytest.raises(UserError, match=message):
        build(**changes)


def test_an_observation_must_have_all_cameras(build, sample):
    with pytest.raises(UserError, match="lacks the cameras"):
        build().observe({key: value for key, value in sample.items() if not key.endswith("wrist")})
