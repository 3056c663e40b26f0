"""Normalisers: published numbers bit for bit, inverses, constants, and what stops a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from vlaforge.data.errors import UserError
from vlaforge.data.norm_table import check, table, text
from vlaforge.data.normalize import NEEDED, Normalizer, NormalizerSet

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05" / "preproc.safetensors"
STATS = ("mean", "std", "min", "max", "q01", "q99")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN)


def make(golden, mode: str, convention: str) -> Normalizer:
    stats = {name: golden[f"norm.{name}"] for name in STATS}
    return Normalizer.from_statistics(mode, stats, "action", convention=convention)


@pytest.mark.parametrize(
    ("mode", "convention", "key"),
    [
        ("mean_std", "lerobot", "norm.lerobot.MEAN_STD.normalized"),
        ("min_max", "lerobot", "norm.lerobot.MIN_MAX.normalized"),
        ("q99", "lerobot", "norm.lerobot.QUANTILES.normalized"),
        ("q99", "openpi", "norm.openpi.quantile"),
        ("mean_std", "openpi", "norm.openpi.zscore"),
    ],
)
def test_published_conventions_bit_for_bit(golden, mode, convention, key):
    normalizer = make(golden, mode, convention)
    y = normalizer.normalize(golden["norm.x"])
    np.testing.assert_array_equal(y, golden[key])
    if convention == "lerobot":
        back = golden[key.replace("normalized", "roundtrip_action")]
        np.testing.assert_array_equal(normalizer.denormalize(y), back)


def test_own_convention_agrees_where_nothing_is_constant(golden):
    own, other = make(golden, "q99", "vlaforge"), make(golden, "q99", "lerobot")
    moving = ~own.constant
    assert moving.any() and own.constant.any()
    x = golden["norm.x"]
    np.testing.assert_array_equal(own.normalize(x)[:, moving], other.normalize(x)[:, moving])
    assert np.abs(other.normalize(x)).max() > 1e6  # what ours is spared
    assert (own.normalize(x)[:, own.constant] == 0).all()


arrays = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=n, max_size=n),
        st.lists(st.floats(0.015625, 1e3, width=32), min_size=n, max_size=n),
        st.lists(st.floats(-2, 2, width=32), min_size=n, max_size=n),
    )
)


@given(arrays, st.sampled_from(["mean_std", "min_max", "q99", "scale"]), st.sampled_from(["vlaforge", "openpi"]))
def test_round_trip(values, mode, convention):
    low, span, at = (np.array(v, np.float64) for v in values)
    a, b = (low, span) if mode == "mean_std" else (low, low + span)
    normalizer = Normalizer(mode, a, b, convention=convention)
    x = (low + span * at).astype(np.float32)
    back = normalizer.denormalize(normalizer.normalize(x))
    np.testing.assert_allclose(back, x, atol=2e-6 * float(np.abs(low).max() + span.max() * 3))


@pytest.mark.parametrize("mode", ["mean_std", "min_max", "q99"])
def test_constant_dimension_is_zero_and_comes_back(mode):
    constant = 0.7300000190734863
    b = [1.0, 0.0] if mode == "mean_std" else [1.0, constant]
    normalizer = Normalizer(mode, np.array([-1.0, constant]), np.array(b))
    assert normalizer.constant.tolist() == [False, True]
    y = normalizer.normalize(np.array([[0.5, constant], [0.5, 9.0]]))
    assert (y[:, 1] == 0).all() and np.isfinite(y).all()
    np.testing.assert_array_equal(normalizer.denormalize(y + 3)[:, 1], np.float32(constant))


def test_per_step_statistics_apply_step_by_step():
    low = np.array([[-1.0, 0.0], [-2.0, 0.0], [-4.0, 0.0]])
    normalizer = Normalizer("min_max", low, -low)
    x = np.stack([low[:, :1].repeat(2, 1)] * 5)
    y = normalizer.normalize(x)
    assert y.shape == (5, 3, 2) and (y[..., 0] == -1).all() and (y[..., 1] == 0).all()
    with pytest.raises(UserError, match="horizon"):
        normalizer.normalize(x[:, :2])


@pytest.mark.parametrize("mode", ["q99", "mean_std", "scale"])
def test_wrong_dimension_is_the_users_fault(mode):
    normalizer = Normalizer(mode, np.zeros(4), np.ones(4))
    for call in (normalizer.normalize, normalizer.denormalize):
        with pytest.raises(UserError, match=r"\[4\].*\[3, 5\]"):
            call(np.zeros((3, 5)))


def test_missing_statistics_never_fall_back():
    stats = {"min": np.zeros(2), "max": np.ones(2), "mean": np.zeros(2), "std": np.ones(2)}
    with pytest.raises(UserError, match="q01 and q99"):
        Normalizer.from_statistics("q99", stats, "action")
    with pytest.raises(UserError, match="did you mean 'min_max'"):
        Normalizer.from_statistics("minmax", stats, "action")
    with pytest.raises(UserError, match="NaN"):
        Normalizer("q99", np.array([0.0, np.nan]), np.ones(2))


def test_clip_binary_and_identity():
    clipped = Normalizer("min_max", np.array([-1.0]), np.array([1.0]), clip=1.0)
    assert clipped.normalize(np.array([7.0])) == 1.0 and clipped.denormalize(np.array([7.0])) == 1.0
    binary = Normalizer("binary")
    assert binary.normalize(np.array([0.5, 0.51, -3])).tolist() == [0.0, 1.0, 0.0]
    assert binary.denormalize(np.array([0.2, 0.9])).tolist() == [0.0, 1.0]
    x = np.array([[1.5, -2.0]], np.float32)
    assert np.array_equal(Normalizer("identity").normalize(x), x)


def test_set_survives_json_with_its_hash(tmp_path, golden):
    stats = {"action": {n: golden[f"norm.{n}"] for n in STATS}}
    stats["observation.state"] = stats["action"]
    made = NormalizerSet.from_statistics(stats, {"action": "q99", "state": "mean_std"}, convention="openpi")
    made.save(tmp_path / "normalizers.json")
    read = NormalizerSet.load(tmp_path / "normalizers.json")
    assert read.hash == made.hash and read.to_json() == made.to_json()
    x = golden["norm.x"]
    for key in ("action", "state"):
        np.testing.assert_array_equal(read.normalize(key, x), made.normalize(key, x))
    changed = NormalizerSet.from_statistics(stats, {"action": "q99", "state": "mean_std"}, convention="lerobot")
    assert changed.hash != made.hash
    (tmp_path / "normalizers.json").write_text('{"format": 1, "normalizers": {"": {"action": {"mod')
    with pytest.raises(UserError, match="damaged"):
        NormalizerSet.load(tmp_path / "normalizers.json")


def test_set_by_embodiment():
    one = Normalizer("min_max", np.zeros(2), np.ones(2))
    two = Normalizer("min_max", np.zeros(2), np.full(2, 4.0))
    normalizers = NormalizerSet({"": {"action": one}}).merged(NormalizerSet.single(action=two), "aloha")
    x = np.ones((1, 2))
    assert (normalizers.normalize("action", x, "aloha") == -0.5).all()
    assert (normalizers.normalize("action", x, "unheard of") == 1).all()
    with pytest.raises(UserError, match=r"no normaliser for 'state'.*\['action'\]"):
        normalizers.normalize("state", x)


def test_every_mode_has_an_inverse_of_the_same_shape():
    for mode, needed in NEEDED.items():
        arrays = (np.zeros(3), np.ones(3)) if needed else ()
        y = Normalizer(mode, *arrays).denormalize(np.zeros((2, 4, 3)))
        assert y.shape == (2, 4, 3) and y.dtype == np.float32


# ------------------------------------------------------------------------------------------------- the table


def stats_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {
        **{n: getattr(rows, n)(0) for n in ("mean", "std", "min", "max")},
        "q01": np.quantile(rows, 0.01, axis=0),
        "q99": np.quantile(rows, 0.99, axis=0),
    }


def test_a_dimension_that_hardly_moves_stops_the_run():
    rng = np.random.default_rng(0)
    rows = rng.uniform(-1, 1, (1000, 3))
    rows[:, 1] = 1.569 + rng.uniform(-0.0005, 0.0005, 1000)
    normalizer = Normalizer.from_statistics("q99", stats_of(rows))
    assert normalizer.normalize(np.array([0.0, 0.0, 0.0]))[1] < -3000  # the published accident
    found = table("action", normalizer, stats_of(rows), rows, ("x", "wrist", "z"))
    assert [row.flag for row in found] == ["", "near-constant", ""]
    assert 0.01 < found[0].outside < 0.03
    assert "near-constant" in text(found) and "wrist" in text(found)
    with pytest.raises(UserError, match=r"dimension 1 'wrist'.*--allow-extreme-norm") as stopped:
        check(found)
    assert text(found) in str(stopped.value)  # the run shows its table as it stops
    assert len(check(found, allow_extreme=True)) == 1


def test_small_beside_the_others_is_near_constant_too():
    rows = np.random.default_rng(0).uniform(-1, 1, (500, 4)) * [1, 1, 1, 1e-4]
    normalizer = Normalizer.from_statistics("mean_std", stats_of(rows))
    assert [row.flag for row in table("state", normalizer, stats_of(rows))] == ["", "", "", "near-constant"]


def test_values_far_outside_foreign_statistics_stop_the_run():
    rows = np.random.default_rng(0).uniform(-1, 1, (500, 2))
    foreign = Normalizer("q99", np.array([-0.9, -0.005]), np.array([0.9, 0.005]))
    found = table("action", foreign, stats_of(rows), rows)
    assert [row.flag for row in found] == ["", "extreme"] and found[1].outside > 0.9
    with pytest.raises(UserError, match=r"dimension 1 .*as large as 200"):
        check(found)


def test_a_gripper_with_equal_quantiles_is_not_thrown_away_in_silence():
    rows = np.zeros((1000, 2))
    rows[:, 0] = np.linspace(-1, 1, 1000)
    rows[::200, 1] = 1.0  # 5 of 1000: q01 = q99 = 0
    normalizer = Normalizer.from_statistics("q99", stats_of(rows))
    with pytest.raises(UserError, match=r"dimension 1 .*thrown away"):
        check(table("action", normalizer, stats_of(rows), rows))
    truly_constant = Normalizer.from_statistics("q99", stats_of(rows * [1, 0]))
    assert check(table("action", truly_constant, stats_of(rows * [1, 0]))) == []
