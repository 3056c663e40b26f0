"""LeRobot datasets: against LeRobot's own reader, the versions against each other, and what goes wrong."""

from __future__ import annotations

import json
import pickle
import shutil
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors import safe_open

from vlaforge.data.errors import UserError
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import DataNeeds
from vlaforge.data.video import DecodeError

SCENE = "observation.images.scene"
ONE = DataNeeds()


@pytest.mark.parametrize("backend", ["pyav", "torchcodec"])
def test_equals_what_lerobot_reads(root, metaworld, backend):
    """Nine recorded samples with two frames of a camera and chunks over episode ends; PyAV frames are equal."""
    dataset = open_dataset(metaworld, video_backend=backend)
    with safe_open(root / "tests/golden/data/metaworld_v30.safetensors", "np") as recorded:
        facts = recorded.metadata()
        texts, offsets = json.loads(facts["strings"]), tuple(json.loads(facts["frame_offsets"]))
        needs = DataNeeds(action_offsets=tuple(range(int(facts["chunk"]))), image_offsets=offsets)
        compared = 0
        for index in json.loads(facts["indices"]):
            sample = dataset.get(index, needs)
            assert sample["task"] == texts[str(index)]["task"]
            for name in [key for key in recorded.keys() if key.startswith(f"{index}/")]:  # noqa: SIM118
                key, expected = name.partition("/")[2], recorded.get_tensor(name)
                got = np.asarray(sample[key])
                if key in (SCENE, "observation.images.wrist"):
                    got = np.moveaxis(got if key == SCENE else got[0], -1, -3)
                    off = np.abs(got.astype(int) - expected)
                    assert off.max() <= (0 if backend == "pyav" else 6) and off.mean() <= 1, name
                else:
                    np.testing.assert_array_equal(got, expected, err_msg=name)
                compared += 1
    assert compared == 9 * 11


def test_versions_hold_the_same_rows(metaworld, v20, v21):
    """v2.0 and v2.1 equal in everything; v3.0 equal but for the codec (AV1 against H.264 of the same pictures)."""
    new, old, older = open_dataset(metaworld), open_dataset(v21), open_dataset(v20)
    assert (new.info.version, old.info.version, older.info.version) == ("v3.0", "v2.1", "v2.0")
    assert len(new) == len(old) == len(older) == 453
    assert new.info.state_names == old.info.state_names == ("x", "y", "z", "gripper")
    needs = DataNeeds(action_offsets=(0, 1, 2), image_offsets=(-3, 0, 3))
    for index in (0, 1, 90, 91, 178, 179, 300, 452):
        a, b, c = (dataset.get(index, needs) for dataset in (new, old, older))
        assert set(a) == set(b) == set(c)
        for key, value in a.items():
            if key in (SCENE, "observation.images.wrist"):
                np.testing.assert_array_equal(b[key], c[key])
                assert np.abs(value.astype(int) - b[key]).mean() < 5
            else:
                np.testing.assert_array_equal(value, b[key], err_msg=key)
                np.testing.assert_array_equal(value, c[key], err_msg=key)
    for episode in new.episodes:
        for key in ("action", "observation.state", "timestamp"):
            np.testing.assert_array_equal(new.column(key, episode), old.column(key, episode))


def test_many_equals_one_by_one(metaworld):
    dataset = open_dataset(metaworld)
    positions = [452, 3, 3, 91, 90, 17]
    needs = DataNeeds(action_offsets=(0, 5), image_offsets=(-1, 0))
    for got, position in zip(dataset.get_many(positions, needs), positions):
        expected = dataset.get(position, needs)
        assert got["index"] == position
        for key, value in expected.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)


def test_windows_stop_at_episode_ends(tiny, numbers):
    dataset = open_dataset(tiny([7, 5]))
    needs = DataNeeds(action_offsets=(0, 1, 2), image_offsets=(-2, 0, 1), state_offsets=(-1, 0))
    last = dataset.get(6, needs)
    assert last["action"][:, 0].tolist() == [6, 6, 6]
    assert last["action_is_pad"].tolist() == [False, True, True]
    assert [numbers.read(frame) for frame in last["observation.images.front"]] == [4, 6, 6]
    assert last["observation.images.front_is_pad"].tolist() == [False, False, True]
    first = dataset.get(7, needs)
    assert [numbers.read(frame) for frame in first["observation.images.front"]] == [7, 7, 8]
    assert first["observation.images.front_is_pad"].tolist() == [True, False, False]
    assert first["observation.state"].tolist() == [[7, 2], [7, 2]] and first["observation.state_is_pad"][0]
    assert first["task"] == "pull" and first["frame_index"] == 0 and first["episode_index"] == 1


def test_many_files_in_chunks(tiny, numbers):
    """Files that are full after each episode: every row and frame is found in its own."""
    root = tiny([6, 4, 9, 5], data_mb=0.0001, video_mb=0.0001, chunk=2)
    assert len(list(root.rglob("data/*/*.parquet"))) == 4 and len(list(root.rglob("*.mp4"))) == 4
    assert (root / "data/chunk-001/file-001.parquet").is_file()
    dataset = open_dataset(root)
    for sample in dataset.get_many(list(range(24)), ONE):
        assert numbers.read(sample["observation.images.front"]) == sample["index"] == sample["action"][0, 0]


@pytest.mark.parametrize("chosen", [[1, 2], [2], "1:3", [2, 0]])
def test_a_filter_restricts_and_never_renumbers(tiny, numbers, chosen):
    root = tiny([30, 20, 10])
    whole, part = open_dataset(root), open_dataset(root, episodes=chosen)
    order = [1, 2] if chosen == "1:3" else chosen
    starts = {0: 0, 1: 30, 2: 50}
    expected = [starts[e] + n for e in order for n in range({0: 30, 1: 20, 2: 10}[e])]
    assert [part.row_id(position) for position in range(len(part))] == expected
    needs = DataNeeds(action_offsets=(-1, 0, 3), image_offsets=(0, 2))
    for position in (0, 9, len(part) - 1):
        a, b = part.get(position, needs), whole.get(part.row_id(position), needs)
        for key, value in a.items():
            np.testing.assert_array_equal(value, b[key], err_msg=key)


def test_splits(tiny, damage):
    root = tiny([3, 3, 3])
    damage.json(root / "meta/info.json", lambda info: info.update(splits={"train": "0:2", "held_out": "2:3"}))
    assert [e.index for e in open_dataset(root).episodes] == [0, 1]
    assert [e.index for e in open_dataset(root, split="held_out").episodes] == [2]
    assert len(open_dataset(root, split="all")) == 9
    with pytest.raises(UserError, match="Unknown split 'heldout': did you mean 'held_out'"):
        open_dataset(root, split="heldout")


def test_episodes_listed_in_another_order(tiny, numbers):
    """The order of the metadata is not that of the files."""
    root = tiny([5, 6, 7])
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).take(pa.array([2, 0, 1])), path)
    dataset = open_dataset(root, split="all")
    assert [e.index for e in dataset.episodes] == [2, 0, 1]
    for sample in dataset.get_many(list(range(18)), ONE):
        assert numbers.read(sample["observation.images.front"]) == sample["index"] == sample["action"][0, 0]


def test_removed_episodes_leave_their_frames(tiny, numbers):
    """An episode taken out of the metadata: its rows and frames are still in the files, and are not counted."""
    root = tiny([5, 6, 7])
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).take(pa.array([0, 2])), path)
    dataset = open_dataset(root, split="all")
    got = [numbers.read(s["observation.images.front"]) for s in dataset.get_many(list(range(12)), ONE)]
    assert got == [*range(5), *range(11, 18)]
    assert [dataset.row_id(n) for n in range(12)] == got


def test_start_times_that_are_sums_of_floats(tiny, numbers, damage):
    """50 episodes in one file, each start a running sum of durations: every frame is the right one."""
    lengths = [7, 3, 11, 4, 9] * 10
    root = tiny(lengths, fps=30)
    starts, total = [], np.float64(0)
    for length in lengths:
        starts.append(float(total))
        total = np.float64(np.float32(total + sum([1 / 30] * length)))
    assert starts[-1] * 30 != round(starts[-1] * 30)
    key = "videos/observation.images.front/from_timestamp"
    damage.table(root / "meta/episodes/chunk-000/file-000.parquet", key, lambda old: np.array(starts))
    dataset = open_dataset(root)
    samples = dataset.get_many(list(range(len(dataset))), ONE)
    assert [numbers.read(s["observation.images.front"]) for s in samples] == list(range(len(dataset)))


# ---------------------------------------------------------------------------------------------------- columns


def test_any_column_names_joined_columns_and_language(tiny, damage):
    root = tiny([4, 4])
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    table = table.rename_columns([{"action": "actions"}.get(name, name) for name in table.schema.names])
    table = table.append_column("gripper", pa.array(np.arange(8) % 2, pa.float32()))
    table = table.append_column("said", pa.array([f"do {n}" for n in range(8)]))
    table = table.append_column("annotation.task", pa.array([1, 1, 1, 1, 0, 0, 0, 0], pa.int64()))
    pq.write_table(table, path)

    def rename(info):
        info["features"]["actions"] = info["features"].pop("action")

    damage.json(root / "meta/info.json", rename)
    with pytest.raises(UserError, match=r"no column 'action'.*data\.action_key=actions"):
        open_dataset(root)
    dataset = open_dataset(root, action_key="actions, gripper", language_key="said")
    sample = dataset.get(5, DataNeeds(action_offsets=(0, 1)))
    assert sample["action"].tolist() == [[5, -5, 1, 1], [6, -6, 2, 0]]
    assert dataset.tasks() == [f"do {n}" for n in range(8)]
    assert dataset.info.action_dim == 4 and sample["task"] == "do 5"
    assert dataset.column("gripper", dataset.episodes[1]).tolist() == [0, 1, 0, 1]
    numbered = open_dataset(root, action_key="actions", language_key="annotation.task", episodes=[0])
    assert numbered.get(0, ONE)["task"] == "pull" and numbered.tasks() == ["pull"]
    with pytest.raises(UserError, match="Unknown column 'gripperr'"):
        open_dataset(root, action_key="actions,gripperr")


def _with_pictures(root, damage, cell, dtype="image", shape=(8, 6, 3), names=None):
    """Replaces the camera's video by pictures in the parquet file."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    key = "observation.images.front"
    pq.write_table(table.append_column(key, cell(table.num_rows)), path, row_group_size=3)
    entry = {"dtype": dtype, "shape": list(shape), "names": names}
    damage.json(root / "meta/info.json", lambda info: info["features"].update({key: entry}))


def _png(number: int) -> bytes:
    target = BytesIO()
    Image.fromarray(np.full((8, 6, 3), number * 10, np.uint8)).save(target, "PNG")
    return target.getvalue()


@pytest.mark.parametrize("kind", ["struct", "bytes", "path"])
def test_image_features(tiny, damage, kind):
    root = tiny([4, 5])
    names = ["height", "width", "channels"]
    if kind == "struct":
        _with_pictures(
            root, damage, lambda n: pa.array([{"bytes": _png(i), "path": None} for i in range(n)]), names=names
        )
    elif kind == "bytes":
        _with_pictures(root, damage, lambda n: pa.array([_png(i) for i in range(n)]), names=names)
    else:
        (root / "images").mkdir()
        for number in range(9):
            (root / f"images/{number}.png").write_bytes(_png(number))
        cell = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        _with_pictures(
            root,
            damage,
            lambda n: pa.array([{"bytes": None, "path": f"images/{i}.png"} for i in range(n)], cell),
            names=names,
        )
    dataset = open_dataset(root)
    assert dataset.info.cameras["front"].kind == "image" and dataset.info.cameras["front"].width == 6
    for sample in pickle.loads(pickle.dumps(dataset)).get_many([8, 0, 5, 4], DataNeeds(image_offsets=(0, 1))):
        frames = sample["observation.images.front"]
        assert frames.shape == (2, 8, 6, 3) and (frames[0] == sample["index"] * 10).all()


@pytest.mark.parametrize(
    ("shape", "names", "asked"),
    [
        ((8, 6, 3), None, None),
        ((3, 8, 6), None, None),
        ((8, 6, 1), ["h", "w", "c"], None),
        ((4, 8, 6), None, None),
        ((3, 3, 3), None, "chw"),
        ((3, 3, 3), None, "hwc"),
        ((3, 3, 3), ["channels", "height", "width"], None),
    ],
)
def test_raw_pixels_in_either_layout(tiny, damage, shape, names, asked):
    """The channel axis comes from the names, the shape, or the user; grey and RGBA become RGB."""
    root = tiny([4, 5])
    pixels = np.random.default_rng(0).integers(0, 255, (9, *shape), dtype=np.uint8)
    kind = pa.list_(pa.list_(pa.list_(pa.uint8())))
    _with_pictures(root, damage, lambda n: pa.array(pixels.tolist(), kind), "uint8", shape, names)
    if asked:
        with pytest.raises(UserError, match=r"which axis is the channels.*image_layout=hwc"):
            open_dataset(root)
    first = asked == "chw" or (names or [""])[0] == "channels" or (shape[0] in (3, 4) and shape[2] == 6)
    expected = np.moveaxis(pixels, 1, -1) if first else pixels
    expected = np.repeat(expected, 3, -1) if expected.shape[-1] == 1 else expected[..., :3]
    dataset = open_dataset(root, image_layout=asked)
    for sample in dataset.get_many([8, 2, 0], ONE):
        np.testing.assert_array_equal(sample["observation.images.front"], expected[sample["index"]])
    assert (dataset.info.cameras["front"].height, dataset.info.cameras["front"].width) == expected.shape[1:3]


@pytest.mark.parametrize("form", ["C", "C11", "HWC", "none"])
def test_camera_statistics_have_one_number_a_channel(tiny, damage, form):
    root = tiny([4, 5])
    key = "observation.images.front"
    whole = np.random.default_rng(0).random((64, 64, 3))
    plain = {"min": whole.min((0, 1)), "max": whole.max((0, 1)), "mean": whole.mean((0, 1))}
    entry = {name: value if form == "C" else value[:, None, None] for name, value in plain.items()}
    if form == "HWC":
        entry = dict.fromkeys(plain, whole)
    stats = (
        {key: {name: value.tolist() for name, value in entry.items()}} if form != "none" else {"action": {"min": [0]}}
    )
    (root / "meta/stats.json").write_text(json.dumps(stats))
    stored = open_dataset(root).stored_statistics()
    if form == "none":
        assert key not in stored
        return
    for name, value in plain.items():
        np.testing.assert_allclose(stored[key][name], value)


def test_v21_statistics_are_merged_exactly(v21, metaworld):
    """Mean and deviation of the whole from those of the episodes; no quantiles are invented."""
    stored = open_dataset(v21).stored_statistics()["action"]
    dataset = open_dataset(metaworld)
    rows = np.concatenate([dataset.column("action", e) for e in dataset.episodes]).astype(np.float64)
    np.testing.assert_allclose(stored["mean"], rows.mean(0), atol=1e-7)
    np.testing.assert_allclose(stored["std"], rows.std(0), atol=1e-6)
    np.testing.assert_array_equal(stored["max"], rows.max(0))
    assert set(stored) == {"min", "max", "mean", "std", "count"}


# ---------------------------------------------------------------------------------------------------- faults


def test_version_must_fit(metaworld, copy_of, damage):
    with pytest.raises(UserError, match=r"is LeRobot v3\.0 by its info\.json, not v2\.1"):
        open_dataset(metaworld, version="v2.1")
    with pytest.raises(UserError, match=r"version 'v1\.6' is not supported.*v2\.0, v2\.1, v3\.0"):
        open_dataset(metaworld, version="v1.6")
    root = copy_of(metaworld)
    damage.json(root / "meta/info.json", lambda info: info.update(codebase_version="v4.0"))
    with pytest.raises(UserError, match=r"codebase_version v4\.0; supported are v2\.0, v2\.1, v3\.0"):
        open_dataset(root)


@pytest.mark.parametrize(
    ("source", "gone", "message"),
    [
        ("metaworld", "meta/info.json", r"meta/info\.json is missing; what is there looks like LeRobot v3\.0"),
        ("metaworld", "meta/episodes", r"lacks meta/episodes"),
        ("metaworld", "meta/tasks.parquet", r"lacks meta/tasks\.parquet"),
        ("metaworld", "data/chunk-000/file-000.parquet", r"lacks data/chunk-000/file-000\.parquet"),
        ("metaworld", "videos/observation.images.wrist", r"lacks videos/observation\.images\.wrist/.*mp4"),
        ("v21", "meta/info.json", r"meta/info\.json is missing; what is there looks like LeRobot v2\.1"),
        ("v21", "meta/episodes.jsonl", r"lacks meta/episodes\.jsonl"),
        ("v21", "data/chunk-000/episode_000003.parquet", r"lacks data/chunk-000/episode_000003\.parquet"),
        ("v21", "videos/chunk-000/observation.images.scene/episode_000004.mp4", r"episode_000004\.mp4"),
    ],
)
def test_missing_files_are_named(request, copy_of, source, gone, message):
    root = copy_of(request.getfixturevalue(source))
    path = root / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(UserError, match=message):
        open_dataset(root)


def test_statistics_may_be_missing(metaworld, copy_of):
    root = copy_of(metaworld)
    (root / "meta/stats.json").unlink()
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.select([name for name in table.schema.names if not name.startswith("stats/")]), path)
    assert open_dataset(root).stored_statistics() is None


def test_a_layout_of_another_version_is_recognised(v21, metaworld, copy_of):
    root = copy_of(v21)
    shutil.copy(metaworld / "meta/info.json", root / "meta/info.json")
    with pytest.raises(UserError, match=r"v3\.0 by its info\.json\) lacks meta/episodes.*look like v2\.1"):
        open_dataset(root)


def test_metadata_that_points_to_another_file_is_refused(tiny, damage):
    root = tiny([5, 6, 7], data_mb=0.0001)
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    damage.table(path, "data/file_index", lambda old: np.array([0, 0, 2]))
    with pytest.raises(UserError, match=r"Episode 1 has 6 rows.*file-000\.parquet holds 0.*holds episodes 0"):
        open_dataset(root)


def test_episodes_that_overlap_in_a_video_are_refused(tiny, damage):
    root = tiny([5, 6])
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    damage.table(path, "videos/observation.images.front/from_timestamp", lambda old: np.array([0.0, 3 / 30]))
    with pytest.raises(UserError, match=r"episode 0 takes frames 0 to 4 of videos.*episode 1 starts at 3"):
        open_dataset(root)


@pytest.mark.parametrize("extra", [1, 2])
def test_start_times_that_drift_are_refused_and_never_read_late(tiny, damage, extra):
    root = tiny([5, 6, 7])
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    late = np.array([0, extra, extra]) / 30
    damage.table(path, "videos/observation.images.front/from_timestamp", lambda old: old + late)
    with pytest.raises(DecodeError, match=rf"18 frames .*need {18 + extra}"):
        open_dataset(root).get(6, ONE)


def test_nan_in_actions_is_named(metaworld, copy_of, damage):
    root = copy_of(metaworld)

    def spoil(values):
        values[95, 2] = np.nan
        return values

    damage.table(root / "data/chunk-000/file-000.parquet", "action", spoil)
    with pytest.raises(UserError, match="the action of episode 1 is NaN or infinite at frame 4"):
        open_dataset(root)
    assert len(open_dataset(root, episodes=[0, 2])) == 91 + 63


def test_faults_of_the_caller(metaworld):
    dataset = open_dataset(metaworld)
    with pytest.raises(UserError, match="Unknown camera 'scen': did you mean 'scene'"):
        dataset.get(0, DataNeeds(cameras=("scen",)))
    with pytest.raises(IndexError, match=r"453 is outside 0\.\.452"):
        dataset.get(453, ONE)
    for wrong, message in (
        ([7], "no episode 7"),
        ([1, 1], "named twice"),
        ("a:b", "cannot be read"),
        ([], "at least one"),
    ):
        with pytest.raises(UserError, match=message):
            open_dataset(metaworld, episodes=wrong)
    with pytest.raises(UserError, match="does not exist"):
        open_dataset("/nowhere/at/all")
    with pytest.raises(UserError, match=r"Hugging Face hub.*copy it to this machine"):
        open_dataset("someone/no-such-dataset")
    with pytest.raises(UserError, match="Unknown dataset format 'lerobot'"):
        open_dataset(metaworld, format="lerobot")


def test_fingerprint_follows_content_and_selection(metaworld, copy_of, damage):
    same = open_dataset(copy_of(metaworld))
    assert open_dataset(metaworld).fingerprint() == same.fingerprint()
    assert open_dataset(metaworld, episodes=[0]).fingerprint() != same.fingerprint()

    def nudge(values):
        values[3, 0] += 1e-3
        return values

    damage.table(same.root / "data/chunk-000/file-000.parquet", "action", nudge)
    assert open_dataset(same.root).fingerprint() != same.fingerprint()
