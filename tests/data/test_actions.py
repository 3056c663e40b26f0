"""Rotations, action modes, and the codec that families use: every map has its inverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlaforge.data.actions import MODES, ActionTransform, Pose
from vlaforge.data.codec import ActionCodec
from vlaforge.data.errors import UserError
from vlaforge.data.normalize import Normalizer, NormalizerSet
from vlaforge.data.rotation import SIZES, absolute_pose, convert, from_matrix, relative_pose, to_matrix
from vlaforge.data.schema import DataConfig


def turns(seed: int, count: int = 50) -> np.ndarray:
    """Random rotation matrices, among them the identity and half turns."""
    q = np.random.default_rng(seed).normal(size=(count, 4))
    q[:4] = [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 1e-9], [0, 0, -1, 0]]
    return to_matrix(q, "quaternion")


@pytest.mark.parametrize("name", SIZES)
def test_round_trip_through_each_representation(name):
    matrix = turns(0)
    there = from_matrix(matrix, name)
    assert there.shape == (50, SIZES[name])
    np.testing.assert_allclose(to_matrix(there, name), matrix, atol=1e-7)
    np.testing.assert_allclose(matrix @ np.swapaxes(matrix, -1, -2), np.broadcast_to(np.eye(3), (50, 3, 3)), atol=1e-12)


def test_known_rotations():
    quarter = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1.0]])  # about z
    h = np.sqrt(0.5)
    expected = {
        "quaternion": [0, 0, h, h],
        "quaternion_wxyz": [h, 0, 0, h],
        "euler": [0, 0, np.pi / 2],
        "axis_angle": [0, 0, np.pi / 2],
        "rot6d": [0, 1, 0, -1, 0, 0],
        "rot6d_rows": [0, -1, 0, 1, 0, 0],
        "rot6d_pairs": [0, -1, 1, 0, 0, 0],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(from_matrix(quarter, name), value, atol=1e-12, err_msg=name)
    three = to_matrix(np.array([0.3, -0.4, 0.5]), "euler")  # x first, then y, then z
    about = [to_matrix(np.array(a), "axis_angle") for a in ([0.3, 0, 0], [0, -0.4, 0], [0, 0, 0.5])]
    np.testing.assert_allclose(three, about[2] @ about[1] @ about[0], atol=1e-12)


def test_rot6d_against_the_published_postprocessing():
    """X-VLA: raw network output to axis-angle."""
    rot6d = np.array([[-0.11412543, 0.23067285, -0.39005905, 0.40466586, -0.67102814, -1.6996098],
                      [0.04050586, 1.0858229, -1.4231572, -0.70841837, 0.86477864, 0.35268152]])  # fmt: skip
    expected = [[-1.8913938, -1.1292832, 2.1515539], [-0.01422679, 1.2223618, 0.95011663]]
    np.testing.assert_allclose(convert(rot6d, "rot6d", "axis_angle"), expected, atol=3e-6)


def test_gimbal_lock_keeps_the_rotation():
    angles = np.array([[0.4, np.pi / 2, 1.1], [0.4, -np.pi / 2, 1.1]])
    matrix = to_matrix(angles, "euler")
    np.testing.assert_allclose(to_matrix(from_matrix(matrix, "euler"), "euler"), matrix, atol=1e-7)


def test_bad_rotations_are_said():
    with pytest.raises(UserError, match="did you mean 'rot6d'"):
        to_matrix(np.zeros(6), "rot6")
    with pytest.raises(UserError, match="4 numbers, not 3"):
        to_matrix(np.zeros(3), "quaternion")


def test_relative_pose_is_the_rigid_product():
    matrix = turns(1, 10)
    pose = np.concatenate([np.random.default_rng(0).normal(size=(10, 3)), from_matrix(matrix, "rot6d")], -1)
    seen = relative_pose(pose, pose[::-1], "rot6d")
    np.testing.assert_allclose(absolute_pose(seen, pose[::-1], "rot6d"), pose, atol=1e-7)
    np.testing.assert_allclose(relative_pose(pose, pose, "rot6d"), [[0, 0, 0, 1, 0, 0, 0, 1, 0]] * 10, atol=1e-7)


@settings(max_examples=40)
@given(
    mode=st.sampled_from(MODES),
    keep=st.sampled_from([(), (9,), (9, 10)]),
    pose=st.sampled_from([(), (Pose(0, "rot6d"),), (Pose(1, "quaternion"),), (Pose(2, "euler"),)]),
    seed=st.integers(0, 99),
)
def test_action_modes_invert(mode, keep, pose, seed):
    rng = np.random.default_rng(seed)
    chunk, state = rng.normal(size=(7, 11)), rng.normal(size=11)
    for block in pose:
        dims = list(block.dims)[3:]
        for x in (chunk, state):
            shape = x[..., dims].shape[:-1]
            x[..., dims] = from_matrix(to_matrix(rng.normal(size=(*shape, 4)), "quaternion"), block.rotation)
    transform = ActionTransform(mode, keep=keep, poses=pose)
    there = transform.apply(chunk, state)
    assert there.dtype == np.float32
    np.testing.assert_allclose(transform.invert(there, state), chunk, atol=2e-5)
    np.testing.assert_allclose(there[:, list(keep)], chunk[:, list(keep)], atol=1e-6)


def test_what_the_modes_mean():
    chunk, state = np.array([[1.0, 5], [3, 5], [6, 7]]), np.array([0.0, 0.5, 2.0])
    plain = {"state_dims": (1, 2)}
    assert ActionTransform("relative", **plain).apply(chunk, state).tolist() == [[0.5, 3], [2.5, 3], [5.5, 5]]
    assert ActionTransform("delta", **plain).apply(chunk, state).tolist() == [[0.5, 3], [2, 0], [3, 2]]
    assert ActionTransform("relative", (1,), **plain).apply(chunk, state).tolist() == [[0.5, 5], [2.5, 5], [5.5, 7]]
    batch = ActionTransform("delta", **plain).apply(np.stack([chunk] * 4), np.stack([state] * 4))
    assert batch.shape == (4, 3, 2)


def test_bad_action_modes_are_said():
    with pytest.raises(UserError, match="did you mean 'relative'"):
        ActionTransform("relativ")
    with pytest.raises(UserError, match=r"\[8\] are named twice"):
        ActionTransform("relative", keep=(8,), poses=(Pose(0),))
    with pytest.raises(UserError, match="needs a state"):
        ActionTransform("delta").apply(np.zeros((2, 3)), None)
    with pytest.raises(UserError, match="the state has 2"):
        ActionTransform("relative").apply(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(UserError, match="ends behind the 5 actions"):
        ActionTransform("relative", poses=(Pose(0),)).apply(np.zeros((2, 5)), np.zeros(5))
    with pytest.raises(UserError, match="start:rotation"):
        Pose.parse("rot6d")


# ------------------------------------------------------------------------------------------------------- codec


def codec(**options) -> ActionCodec:
    low, high = np.array([-2.0, -4.0, 0.0]), np.array([2.0, 4.0, 1.0])
    normalizers = NormalizerSet.single(
        action=Normalizer("q99", low, high), state=Normalizer("mean_std", np.zeros(3), np.full(3, 2.0))
    )
    return ActionCodec(DataConfig(**options), normalizers, width=5, state_width=4)


@pytest.fixture
def sample() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    pad = np.array([False] * 4 + [True] * 2)
    state = rng.normal(size=3).astype(np.float32)
    return {"action": rng.normal(size=(6, 3)).astype(np.float32), "action_is_pad": pad, "observation.state": state}


@pytest.mark.parametrize("mode", MODES)
def test_codec_returns_what_it_was_given(sample, mode):
    made = codec(action_mode=mode, action_keep=(2,))
    actions, mask = made.encode(sample)
    assert actions.shape == (6, 5) == mask.shape and actions.dtype == np.float32
    assert mask.sum() == 4 * 3 and not mask[4:].any() and not mask[:, 3:].any()
    assert (actions[:, 3:] == 0).all()
    np.testing.assert_allclose(made.decode(actions, sample), sample["action"], atol=1e-5)
    assert made.state(sample).tolist() == pytest.approx([*(sample["observation.state"] / 2), 0])


def test_codec_refuses_a_sample_without_its_padding_flags(sample):
    del sample["action_is_pad"]
    with pytest.raises(UserError, match="action_is_pad"):
        codec().encode(sample)


def test_codec_refuses_more_dimensions_than_the_model_has(sample):
    made = codec()
    made.width = 2
    with pytest.raises(UserError, match="3 dimensions, but the model takes 2"):
        made.encode(sample)
