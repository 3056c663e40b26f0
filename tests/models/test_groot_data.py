"""GR00T's files beside data and weights: parts of states and actions, official statistics; colours of augmentation."""

import colorsys
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.data.prepare import prepare
from vlaforge.data.readers import open_dataset
from vlaforge.data.tokenizer import Tokenizer
from vlaforge.models import family
from vlaforge.models.groot import colour
from vlaforge.models.groot.official import Official
from vlaforge.models.groot.processing import GrootProcessing
from vlaforge.runtime.config import resolve

NAME = "groot_n1_7"
PARTS = {"gripper": (3, 4), "hand": (0, 3)}


@pytest.fixture(scope="module")
def resolved():
    return resolve(["--model", NAME, "--preset", "tiny"])


@pytest.fixture(scope="module")
def dataset(metaworld):
    return open_dataset(metaworld)


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def modality(folder, **changes):
    """A `meta/modality.json` that names the gripper first."""
    parts = {name: {"start": start, "end": end} for name, (start, end) in PARTS.items()}
    videos = {"hand": {"original_key": "observation.images.wrist"}, "scene": {}}
    write(folder / "meta" / "modality.json", {"state": parts, "action": parts, "video": videos, **changes})


@pytest.fixture
def build(resolved, dataset, tmp_path):
    """The processing of the bundled demonstrations as if their files were in `tmp_path`, and its normalisers."""

    def build(**changes) -> GrootProcessing:
        model = replace(resolved.model_config, action_dim=4, state_dim=4)
        info = replace(dataset.info, path=tmp_path)
        data, given = GrootProcessing.official(model, replace(resolved.data_config, **changes), info)
        normalizers = prepare(dataset, data, model.action_horizon, given).normalizers
        tokenizer = Tokenizer(resolved.args.tokenizer_path, **GrootProcessing.tokenizer_options)
        return family(NAME).processing(model, data, normalizers, tokenizer, info)

    return build


def both(processing, dataset, position=85):
    sample = dataset.get(position, processing.needs())
    return sample, processing.sample(sample, np.random.default_rng(0), False)


# ------------------------------------------------------------------------------------------- meta/modality.json


def test_parts_stand_in_the_files_order_and_come_back_in_the_datasets(build, dataset, tmp_path):
    plain = build()
    assert plain.cameras == ("scene", "wrist")
    _, fields = both(plain, dataset)
    modality(tmp_path)
    processing = build()
    assert processing.cameras == ("wrist", "scene")
    _, ordered = both(processing, dataset)
    for name in ("actions", "state", "action_mask"):
        assert np.array_equal(ordered[name][..., :4], fields[name][..., [3, 0, 1, 2]])
    assert np.array_equal(ordered["images"], fields["images"][::-1])
    assert np.array_equal(processing.actions(ordered["actions"]), plain.actions(fields["actions"]))
    _, left = both(build(use_modality=False), dataset)
    assert all(np.array_equal(left[name], fields[name]) for name in fields)


def test_a_state_may_leave_dimensions_out_and_an_action_not(build, dataset, tmp_path):
    modality(tmp_path, state={"gripper": {"start": 3, "end": 4}})
    _, fields = both(build(), dataset)
    assert fields["state"][0] != 0 and not fields["state"][1:].any()
    modality(tmp_path, action={"gripper": {"start": 3, "end": 4}})
    with pytest.raises(UserError, match=r"dimensions \[0, 1, 2\] not exactly once"):
        build()
    modality(tmp_path, action={"gripper": {"start": 3, "end": 9}})
    with pytest.raises(UserError, match="from 3 to 9; the column has 4"):
        build()
    modality(tmp_path, action={"gripper": {"start": 3, "end": 4, "original_key": "action.gripper"}})
    with pytest.raises(UserError, match=r"in column 'action\.gripper'"):
        build()


# ------------------------------------------------------------------------------------------- official files


def official(folder, relative=False, rep="ActionRepresentation.RELATIVE", state=(), action=(), **kwargs):
    """A checkpoint's files for `libero_sim`: statistics by part, the gripper first. `state` and `action` are further
    entries of their modality, `rep` the representation of the hand's actions."""
    stats = {
        name: {"min": [-2.0] * (end - start), "max": [4.0] * (end - start), "q01": [-1.0 - start] * (end - start),
               "q99": [3.0] * (end - start), "mean": [0.5] * (end - start), "std": [2.0] * (end - start)}
        for name, (start, end) in PARTS.items()
    }  # fmt: skip
    steps = [[-1.0 - step] * 3 for step in range(8)], [[1.0 + step] * 3 for step in range(8)]
    held = {"state": stats, "action": stats, "relative_action": {"hand": dict(zip(("min", "max"), steps))}}
    reps = [{"rep": "ABSOLUTE"}, {"rep": rep, "type": "NON_EEF"}]
    names = list(PARTS)
    configs = {
        "state": {"modality_keys": names, **dict(state)},
        "action": {"modality_keys": names, "action_configs": reps, "delta_indices": list(range(8)), **dict(action)},
    }
    write(folder / "statistics.json", {"libero_sim": held})
    write(folder / "embodiment_id.json", {"libero_sim": 2})
    settings = {"use_percentiles": True, "use_relative_action": relative, "modality_configs": {"libero_sim": configs}}
    write(folder / "processor_config.json", {"processor_kwargs": settings | kwargs})


def test_official_statistics_take_the_place_of_the_datasets(build, dataset, tmp_path):
    folder = tmp_path / "official"
    official(folder)
    modality(tmp_path)
    processing = build(official_folder=str(folder), embodiment_tag="libero_sim")
    sample, fields = both(processing, dataset)
    low = np.array([-4.0, -1, -1, -1])  # the gripper first, as in the checkpoint
    expected = 2 * (sample["action"][:, [3, 0, 1, 2]] - low) / (3 - low) - 1
    inside = fields["action_mask"][:, :4]
    np.testing.assert_allclose(fields["actions"][:, :4][inside], np.clip(expected, -1, 1)[inside], atol=1e-6)
    assert fields["embodiment"] == 2 and not fields["action_mask"][8:].any()
    back = processing.actions(fields["actions"])
    np.testing.assert_allclose(back[inside[:, 0]], sample["action"][inside[:, 0]], atol=1e-6)
    official(folder, use_percentiles=False)
    ranges = build(official_folder=str(folder), embodiment_tag="libero_sim")
    np.testing.assert_allclose(
        both(ranges, dataset)[1]["state"][:4], (sample["observation.state"][[3, 0, 1, 2]] + 2) / 3 - 1, atol=1e-6
    )
    own = build(official_folder=str(folder), embodiment_tag="libero_sim", official_statistics=False)
    assert not np.array_equal(both(own, dataset)[1]["state"], fields["state"])


def test_relative_parts_have_the_bounds_of_each_step(build, dataset, tmp_path):
    official(tmp_path / "official", relative=True)
    processing = build(official_folder=str(tmp_path / "official"), embodiment_tag="libero_sim", clip=False)
    # No modality file: the parts stand one behind the other, in the checkpoint's order.
    assert processing.data.action_mode == "relative" and processing.data.action_keep == (0,)
    sample, fields = both(processing, dataset)
    step = np.minimum(np.arange(16), 7)[:, None]
    moved = (sample["action"][:, 1:] - sample["observation.state"][1:]) / (1 + step)
    expected = np.concatenate([2 * (sample["action"][:, :1] + 4) / 7 - 1, moved], 1)
    inside = fields["action_mask"][:, 0]
    assert inside.sum() == 6
    np.testing.assert_allclose(fields["actions"][:6, :4], np.clip(expected, -1, 1)[:6], atol=1e-5)


@pytest.mark.parametrize("form, poses", [
    ("XYZ_ROT6D", "0:rot6d"), ("ActionFormat.XYZ_ROTVEC", "0:axis_angle"), ("xyz+rotvec", "0:axis_angle"),
    ("DEFAULT", None),
])  # fmt: skip
def test_relative_poses_are_in_the_checkpoints_format(resolved, tmp_path, form, poses):
    config = {"rep": "RELATIVE", "type": "EEF", "format": form}
    modality = {"action": {"modality_keys": ["hand"], "action_configs": [config]}}
    given = {"use_relative_action": True, "modality_configs": {"libero_sim": modality}}
    write(tmp_path / "official" / "processor_config.json", {"processor_kwargs": given})
    data = replace(resolved.data_config, official_folder=str(tmp_path / "official"), embodiment_tag="libero_sim")
    dims = {"action": {"hand": range(9)}, "state": {"hand": range(9)}}
    if poses is None:
        with pytest.raises(UserError, match="'hand' of format 'default': officially too"):
            Official.of(data).relative_options(data, dims)
    else:
        assert Official.of(data).relative_options(data, dims).action_poses == (poses,)


def test_displacements_are_learned_as_they_are(build, dataset, tmp_path):
    """``rep`` delta: the dataset holds displacements already, which officially no step converts, either way."""
    given = {"official_folder": str(tmp_path / "official"), "embodiment_tag": "libero_sim"}
    official(tmp_path / "official")
    sample, fields = both(build(**given), dataset)
    official(tmp_path / "official", relative=True, rep="DELTA")
    processing = build(**given)
    assert processing.data.action_mode == "absolute"
    assert np.array_equal(both(processing, dataset)[1]["actions"], fields["actions"])
    inside = fields["action_mask"][:, 0]
    np.testing.assert_allclose(processing.actions(fields["actions"])[inside], sample["action"][inside], atol=1e-6)


@pytest.mark.parametrize("parted", [False, True])
def test_angles_are_seen_as_sines_then_cosines(build, dataset, tmp_path, parted):
    """In radians as recorded, not normalised and not clipped; part by part, in the checkpoint's order."""
    if parted:
        modality(tmp_path)
    folder = tmp_path / "official"
    given = {"official_folder": str(folder), "embodiment_tag": "libero_sim"}
    official(folder, relative=True)
    whole = build(**given)
    _, without = both(whole, dataset)
    official(folder, relative=True, apply_sincos_state_encoding=True, state={"sin_cos_embedding_keys": ["hand"]})
    processing = build(**given)
    sample, fields = both(processing, dataset)
    hand = sample["observation.state"][:3] if parted else sample["observation.state"][1:]
    assert np.array_equal(fields["state"], [without["state"][0], *np.sin(hand), *np.cos(hand), 0])
    # Relative actions refer to the state itself.
    assert np.array_equal(fields["actions"], without["actions"])
    assert np.array_equal(processing.actions(fields["actions"], sample), whole.actions(without["actions"], sample))
    official(folder, apply_sincos_state_encoding=False, state={"sin_cos_embedding_keys": ["hand"]})
    assert not build(**given, sin_cos_embedding_keys=("hand",)).data.sin_cos_embedding_keys


def test_angles_need_no_official_files(build, dataset, tmp_path):
    modality(tmp_path)
    (_, plain), (sample, fields) = (both(build(sin_cos_embedding_keys=k), dataset) for k in ((), ("gripper",)))
    gripper = sample["observation.state"][3]
    assert np.array_equal(fields["state"], [np.sin(gripper), np.cos(gripper), *plain["state"][1:4], 0, 0, 0])


def test_parts_may_be_normalised_by_mean_and_deviation(build, dataset, tmp_path):
    """The state is not clipped then, nor are actions on their way back; a dimension without deviation stays raw."""
    by_mean = {"mean_std_embedding_keys": ["hand"]}
    official(tmp_path / "official", state=by_mean, action=by_mean)
    stats = json.loads((tmp_path / "official" / "statistics.json").read_text())
    for kind in ("state", "action"):
        stats["libero_sim"][kind]["hand"] |= {"mean": [0.5, 9.0, 0.25], "std": [0.01, 2.0, 0.0]}
    write(tmp_path / "official" / "statistics.json", stats)
    processing = build(official_folder=str(tmp_path / "official"), embodiment_tag="libero_sim")
    sample, fields = both(processing, dataset)
    state, action = sample["observation.state"], sample["action"]
    mean, std = np.array([0.5, 9.0, 0.0]), np.array([0.01, 2.0, 1.0])
    expected = (state[1:] - mean) / std
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(fields["state"][1:4], expected, rtol=1e-4, atol=1e-5)
    learned = np.clip((action[:, 1:] - mean) / std, -1, 1)
    np.testing.assert_allclose(fields["actions"][:6, 1:4], learned[:6], rtol=1e-4, atol=1e-5)
    back = processing.actions(np.full((16, 8), 1.5, np.float32))
    np.testing.assert_allclose(back[0], [3.0, *(mean + 1.5 * std)], rtol=1e-5)


def test_statistics_of_another_robot_are_refused(build, tmp_path):
    official(tmp_path / "official")
    stats = json.loads((tmp_path / "official" / "statistics.json").read_text())
    stats["libero_sim"]["state"]["hand"] = {name: [0.0] * 2 for name in ("min", "max", "q01", "q99")}
    write(tmp_path / "official" / "statistics.json", stats)
    with pytest.raises(UserError, match="has 3 state dimensions for 'libero_sim', and the dataset has 4"):
        build(official_folder=str(tmp_path / "official"), embodiment_tag="libero_sim")


# ------------------------------------------------------------------------------------------- colours


def test_hue_turns_the_circle_of_hsv():
    pixels_1CHW = torch.from_numpy(np.random.default_rng(0).random((1, 3, 5, 7)).astype(np.float32))
    pixels_1CHW[..., 0] = 0.4  # grey has no hue
    turned_1CHW = colour.hue(pixels_1CHW, 0.3)
    for rgb, ours in zip(pixels_1CHW[0].flatten(1).T, turned_1CHW[0].flatten(1).T):
        h, s, v = colorsys.rgb_to_hsv(*rgb.tolist())
        np.testing.assert_allclose(ours, colorsys.hsv_to_rgb((h + 0.3) % 1, s, v), atol=1e-5)


def test_colours_change_alike_in_all_views():
    views = np.random.default_rng(0).integers(0, 256, (2, 6, 6, 3), dtype=np.uint8)
    views[1] = views[0]
    one, other = (colour.jitter(views, (0.3, 0.4, 0.5, 0.08), np.random.default_rng(n)) for n in (1, 2))
    assert np.array_equal(one[0], one[1]) and not np.array_equal(one, other)
    assert np.array_equal(colour.jitter(views, (0, 0, 0, 0), np.random.default_rng(1)), views)
    grey = np.full((1, 2, 2, 3), 100, np.uint8)
    brighter = colour.jitter(grey, (0.3, 0, 0, 0), np.random.default_rng(3))
    assert brighter.min() >= 70 and brighter.max() <= 130 and np.ptp(brighter) == 0
    assert np.array_equal(colour.jitter(grey, (0, 0.4, 0.5, 0.08), np.random.default_rng(3)), grey)
