"""HDF5 datasets: against the reference reader, and against the LeRobot dataset of the same episodes."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from safetensors import safe_open

from vlaforge.data.errors import UserError
from vlaforge.data.readers import guess_format, open_dataset
from vlaforge.data.schema import DataNeeds


def hdf5(path, **options):
    return open_dataset(path, format="hdf5_datasets", **options)


def test_agilex_equals_the_reference_reader(root, agilex):
    """Every sample's place, six whole samples bit for bit, and the statistics of the trajectories."""
    dataset = hdf5(agilex)
    with safe_open(root / "tests/golden/data/metaworld_agilex_hdf5.safetensors", "np") as recorded:
        facts = recorded.metadata()
        places = [dataset.locate(n) for n in range(len(dataset))]
        assert [[e.index, row] for e, row in places] == recorded.get_tensor("index").tolist()
        needs = DataNeeds(action_offsets=tuple(range(int(facts["action_horizon"]))))
        for index in json.loads(facts["indices"]):
            sample, texts = dataset.get(index, needs), json.loads(facts["strings"])[str(index)]
            assert sample["task"] == texts["task"] and dataset.info.robot_type == texts["robot_type"]
            names = [key for key in recorded.keys() if key.startswith(f"{index}/")]  # noqa: SIM118
            assert len(names) == 5
            for name in names:
                got = sample[name.partition("/")[2]]
                got = np.moveaxis(got, -1, 0) if "images" in name else got
                np.testing.assert_array_equal(got, recorded.get_tensor(name), err_msg=name)
        rows = np.concatenate([dataset.column("action", e) for e in dataset.episodes])
        for name, value in (("mean", rows.mean(0)), ("std", rows.std(0)), ("q99", np.quantile(rows, 0.99, axis=0))):
            np.testing.assert_array_equal(value.astype(np.float32), recorded.get_tensor(f"stats/action/{name}"))


def test_agilex_samples_near_the_end_are_compressed_in_time(agilex):
    dataset = hdf5(agilex)
    sample = dataset.get(len(dataset) - 1, DataNeeds(action_offsets=tuple(range(8))))
    last = dataset.column("action", dataset.episodes[-1])[-1]
    np.testing.assert_allclose(sample["action"][-1], last, atol=0.02)
    assert sample["action"].shape == (8, 20) and not sample["action_is_pad"].any()


def test_aloha_and_robomimic_hold_the_lerobot_rows(metaworld, aloha, robomimic):
    """Episodes 0 and 5 of the bundled dataset; pictures equal up to the codecs, JPEG and raw exactly."""
    video = open_dataset(metaworld, episodes=[0, 5])
    first, second = hdf5(aloha), hdf5(robomimic, split="all")
    assert (first.info.version, second.info.version) == ("aloha", "robomimic")
    assert first.info.fps == 50 and second.info.fps == 80 and "50 frames a second assumed" in first.notes[0]
    assert len(video) == len(first) == len(second) == 169
    needs = DataNeeds(action_offsets=(0, 1, 5), image_offsets=(-2, 0))
    for index in (0, 1, 90, 91, 168):
        a, b, c = (dataset.get(index, needs) for dataset in (video, first, second))
        for key in ("action", "action_is_pad", "observation.state", "task", "frame_index"):
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
            np.testing.assert_array_equal(a[key], c[key], err_msg=key)
        picture, raw = b["observation.images.cam_high"], c["observation.images.agentview_rgb"]
        np.testing.assert_array_equal(picture, raw)
        assert np.abs(a["observation.images.scene"].astype(int) - picture).mean() < 5
        np.testing.assert_array_equal(b["observation.images.cam_high_is_pad"], a["observation.images.scene_is_pad"])
    assert second.notes == ["state made of obs/ee_pos,obs/gripper_states"]


def test_masks_are_splits(robomimic):
    assert [e.index for e in hdf5(robomimic).episodes] == [0]
    dataset = hdf5(robomimic, split="valid")
    assert [e.index for e in dataset.episodes] == [1] and dataset.row_id(0) == 91
    with pytest.raises(UserError, match="Unknown split 'test'"):
        hdf5(robomimic, split="test")


def test_the_task_falls_back_to_the_file_name(robomimic, tmp_path):
    path = tmp_path / "open_the_top_drawer_demo.hdf5"
    with h5py.File(robomimic) as source, h5py.File(path, "w") as file:
        source.copy("data", file)
        for demo in file["data"].values():
            del demo.attrs["language_instruction"]
    assert hdf5(path).get(0, DataNeeds()).get("task") == "open the top drawer"


def test_columns_by_name(aloha, robomimic):
    dataset = hdf5(aloha, state_key="observations/qpos,observations/qvel", fps=30)
    assert dataset.info.state_dim == 8 and dataset.info.fps == 30
    assert dataset.column("observations/qvel", dataset.episodes[0]).shape == (91, 4)
    with pytest.raises(UserError, match=r"no dataset 'qposs' for the state.*observations/qpos"):
        hdf5(aloha, state_key="qposs")
    with pytest.raises(UserError, match=r"data\.action_key"):
        hdf5(robomimic, action_key="velocities")


def test_formats_and_layouts_are_found(aloha, agilex, robomimic, metaworld, tmp_path):
    assert {guess_format(path) for path in (aloha, agilex, robomimic)} == {"hdf5_datasets"}
    assert guess_format(metaworld) == "lerobot_datasets"
    with pytest.raises(UserError, match="holds HDF5 recordings: read it as hdf5_datasets"):
        open_dataset(aloha)
    assert hdf5(aloha / "episode_0.hdf5").info.version == "aloha"
    with pytest.raises(UserError, match="lacks observations/eef_quaternion"):
        hdf5(aloha, hdf5_layout="agilex")
    with pytest.raises(UserError, match="Unknown HDF5 layout 'alohaa': did you mean 'aloha'"):
        hdf5(aloha, hdf5_layout="alohaa")
    with pytest.raises(UserError, match="holds no HDF5 file"):
        hdf5(tmp_path)
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["numbers"] = np.arange(3)
    with pytest.raises(UserError, match=r"of no known HDF5 layout.*robomimic: data/demo_<i>"):
        hdf5(tmp_path)
    (tmp_path / "other.hdf5").write_bytes(b"not hdf5 at all")
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        hdf5(tmp_path)


def test_recordings_must_agree(aloha, copy_of):
    root = copy_of(aloha)
    with h5py.File(root / "episode_1.hdf5", "r+") as file:
        del file["observations/images/cam_wrist"]
    with pytest.raises(UserError, match=r"episode_1\.hdf5.* has the cameras cam_high, but"):
        hdf5(root)
    with h5py.File(root / "episode_1.hdf5", "r+") as file:
        file["observations/images/cam_wrist"] = file["observations/images/cam_high"]
        file["action"][4, 1] = np.inf
    with pytest.raises(UserError, match=r"episode_1\.hdf5.*action is NaN or infinite at row 4"):
        hdf5(root)
