"""`forge-data check`: each defect, planted alone, is found with file and episode, and training does not swallow it."""

from __future__ import annotations

import shutil

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlaforge.data.check import check
from vlaforge.data.errors import UserError
from vlaforge.data.readers import open_dataset
from vlaforge.data.schema import DataNeeds
from vlaforge.runtime.commands.data import main

ROWS = "data/chunk-000/file-000.parquet"
TABLE = "meta/episodes/chunk-000/file-000.parquet"
SCENE = "videos/observation.images.scene/chunk-000/file-000.mp4"
V2_ROWS = "data/chunk-000/episode_000003.parquet"
V2_SCENE = "videos/chunk-000/observation.images.scene/episode_000003.mp4"


def test_clean_datasets(metaworld, v20, v21, aloha, robomimic, agilex, capsys):
    """No errors, exit code 0; only LeRobot's averaged quantiles are remarked on."""
    for path in (metaworld, v20, v21, aloha, robomimic, agilex):
        assert main(["check", str(path)]) == 0, path
        out = capsys.readouterr().out
        assert ("no defect found" in out) != (path == metaworld), out
    assert "0 errors, 2 warnings" in "\n".join(check(metaworld).lines())
    assert main(["check", str(metaworld), "--strict"]) == 1


def cell(row, dimension, value):
    def change(values):
        if values.ndim == 1:
            values[row] = value
        else:
            values[row, dimension] = value
        return values

    return change


def drop_frames(path, count):
    """Writes the video at `path` again without its last `count` frames."""
    other = path.with_suffix(".new.mp4")
    with av.open(str(path)) as source, av.open(str(other), "w") as output:
        stream = source.streams.video[0]
        copy = output.add_stream_from_template(stream, opaque=True)
        packets = [packet for packet in source.demux(stream) if packet.dts is not None]
        for packet in packets[: len(packets) - count]:
            packet.stream = copy
            output.mux(packet)
    other.replace(path)


def rewrite(path, change):
    pq.write_table(change(pq.read_table(path)), path)


def replaced(table, name, array):
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, array)


# name: (source, how to plant it, kind, episode or None, text of the finding, what training says or None if it works)
PLANTED = {
    "video missing": (
        "metaworld",
        lambda root, damage: (root / SCENE).unlink(),
        ("files", 0, "file-000.mp4 is missing"),
        "lacks videos/observation.images.scene",
    ),
    "video short": (
        "metaworld",
        lambda root, damage: drop_frames(root / SCENE, 2),
        ("video", 5, "451 frames, 2 fewer than its 78 rows need"),
        "451 frames .* need 453",
    ),
    "video of one episode short": (
        "v21",
        lambda root, damage: drop_frames(root / V2_SCENE, 1),
        ("video", 3, "57 frames, 1 fewer"),
        "57 frames .* need 58",
    ),
    "timestamps off the grid": (
        "metaworld",
        lambda root, damage: damage.table(root / ROWS, "timestamp", cell(100, 0, 0.12)),
        ("timestamps", 1, "frame 9 has 0.1200 s, expected 0.1125 s"),
        None,
    ),
    "NaN in the state": (
        "metaworld",
        lambda root, damage: damage.table(root / ROWS, "observation.state", cell(200, 1, np.nan)),
        ("values", 2, "'observation.state' has NaN in 1 rows, first frame 21, dimension 1"),
        "state of episode 2 is NaN",
    ),
    "constant dimension": (
        "metaworld",
        lambda root, damage: damage.table(root / ROWS, "action", cell(slice(None), 2, 0.5)),
        ("constant", None, "dimension 2 (z) of 'action' is 0.5 in every row"),
        None,
    ),
    "statistics disagree": (
        "metaworld",
        lambda root, damage: damage.json(root / "meta/stats.json", lambda s: s["action"]["mean"].__setitem__(1, 0.9)),
        ("statistics", None, "mean of 'action' is 0.9 in dimension 1"),
        None,
    ),
    "a quantile outside the data": (
        "metaworld",
        lambda root, damage: damage.json(root / "meta/stats.json", lambda s: s["action"]["q99"].__setitem__(0, 3.0)),
        ("statistics", None, "q99 of 'action' is 3 in dimension 0, but the data has nothing beyond 1"),
        None,
    ),
    "statistics of another size": (
        "metaworld",
        lambda root, damage: damage.json(root / "meta/stats.json", lambda s: s["action"]["std"].append(1.0)),
        ("statistics", None, "std of 'action' has 5 numbers, but the data has 4"),
        None,
    ),
    "statistics of one episode disagree": (
        "v21",
        lambda root, damage: damage.lines(
            root / "meta/episodes_stats.jsonl",
            lambda lines: [
                line["stats"]["action"]["max"].__setitem__(0, 7.0) or line if line["episode_index"] == 4 else line
                for line in lines
            ],
        ),
        ("statistics", 4, "max of 'action' is 7 in dimension 0"),
        None,
    ),
    "task number out of range": (
        "metaworld",
        lambda root, damage: damage.table(root / ROWS, "task_index", cell(slice(91, 179), 0, 9)),
        ("tasks", 1, "task numbers 9 are not in the list of tasks (0, 1, 2)"),
        "rows have task number 9",
    ),
    "wrong dtype": (
        "metaworld",
        lambda root, damage: rewrite(
            root / ROWS, lambda t: replaced(t, "timestamp", t["timestamp"].cast(pa.float64()))
        ),
        ("types", None, "column 'timestamp' has dtype float64; info.json says float32"),
        None,
    ),
    "wrong shape": (
        "v21",
        lambda root, damage: rewrite(
            root / V2_ROWS, lambda t: replaced(t, "action", pa.array([row[:3] for row in t["action"].to_pylist()]))
        ),
        ("types", None, "column 'action' has shape [3]; info.json says [4]"),
        "rows of shapes",
    ),
    "column missing": (
        "v21",
        lambda root, damage: rewrite(root / V2_ROWS, lambda t: t.drop_columns(["action"])),
        ("types", None, "lacks column 'action'"),
        "action",
    ),
    "episode listed twice": (
        "v21",
        lambda root, damage: damage.lines(root / "meta/episodes.jsonl", lambda lines: [*lines, lines[2]]),
        ("episodes", 2, "is listed twice"),
        "is listed twice",
    ),
    "length in the metadata": (
        "v21",
        lambda root, damage: damage.lines(
            root / "meta/episodes.jsonl", lambda lines: [line | {"length": line["length"] + 1} for line in lines]
        ),
        ("rows", 5, "has 79 rows in its metadata, but"),
        "has 92 rows in its metadata",
    ),
    "metadata points to another file": (
        "v21",
        lambda root, damage: shutil.copy(root / "data/chunk-000/episode_000000.parquet", root / V2_ROWS),
        ("rows", 3, "holds 0 rows of it (it holds episodes 0)"),
        "Episode 3 has 58 rows",
    ),
    "rows out of order": (
        "metaworld",
        lambda root, damage: damage.table(root / ROWS, "frame_index", cell(95, 0, 2)),
        ("rows", 1, "frame_index in"),
        "frame_index",
    ),
    "totals": (
        "metaworld",
        lambda root, damage: damage.json(root / "meta/info.json", lambda info: info.update(total_frames=454)),
        ("episodes", None, "total_frames is 454, but the metadata lists 453"),
        None,
    ),
    "size of the frames": (
        "metaworld",
        lambda root, damage: damage.json(
            root / "meta/info.json", lambda i: i["features"]["observation.images.scene"].update(shape=[96, 128, 3])
        ),
        ("video", None, "frames are 128 x 128; info.json says 96 x 128"),
        None,
    ),
    "damaged parquet": (
        "v21",
        lambda root, damage: (root / V2_ROWS).write_bytes(b"PAR1 nothing"),
        ("files", 3, "cannot be read as parquet"),
        "cannot be read as parquet",
    ),
    "damaged metadata": (
        "v21",
        lambda root, damage: (root / "meta/tasks.jsonl").write_text('{"task_index": 0}\n'),
        ("files", None, "tasks.jsonl, line 1, lacks task"),
        "line 1, lacks task",
    ),
    "duplicate": (
        "v21",
        lambda root, damage: rewrite(
            root / V2_ROWS, lambda t: rows_of(root / "data/chunk-000/episode_000002.parquet", t)
        ),
        ("duplicates", 3, "has the same actions and states as episode 2"),
        None,
    ),
}


def rows_of(path, table):
    """`table` with the first actions and states of another episode."""
    other = pq.read_table(path).slice(0, table.num_rows)
    for name in ("action", "observation.state"):
        table = replaced(table, name, other[name])
    return table


@pytest.mark.parametrize("name", PLANTED)
def test_each_defect_is_found_and_named(request, copy_of, damage, capsys, name):
    source, plant, (kind, episode, text), refusal = PLANTED[name]
    root = copy_of(request.getfixturevalue(source))
    if name == "duplicate":  # episodes 2 and 3 get one length, so that they can be equal
        cut_episode(root, damage)
    plant(root, damage)
    assert main(["check", str(root), "--all"]) == 1
    report = check(root)
    hits = [f for f in report.errors if f.kind == kind and f.episode == episode and text in f.message]
    assert len(hits) == 1, "\n".join(report.lines(None))
    assert hits[0].file
    where = f"episode {episode}: " if episode is not None else ""
    assert where in capsys.readouterr().out
    if not name.startswith(("length", "duplicate", "episode listed")):  # those change what other checks compare with
        assert {f.kind for f in report.errors} <= {kind, "statistics"}, "\n".join(report.lines())
    if refusal is None:
        samples = open_dataset(root).get_many([0, 100, 300], DataNeeds((0, 1)))
        assert all(np.isfinite(sample["action"]).all() for sample in samples)
    else:
        with pytest.raises(UserError, match=refusal):
            open_dataset(root).get_many(list(range(230, 290)), DataNeeds())


def cut_episode(root, damage):
    """Cuts episode 2 to the 58 rows of episode 3."""
    length = 58
    rewrite(root / "data/chunk-000/episode_000002.parquet", lambda table: table.slice(0, length))
    damage.lines(
        root / "meta/episodes.jsonl",
        lambda lines: [line | {"length": length} if line["episode_index"] == 2 else line for line in lines],
    )


def test_more_frames_than_rows_is_a_warning(tiny, damage):
    """Frames nobody asks for hurt nothing; they are mentioned."""
    root = tiny([5, 6])
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 1), path)
    damage.json(root / "meta/info.json", lambda info: info.update(total_episodes=1, total_frames=5))
    report = check(root)
    assert any(f.kind == "video" and "6 more than its episodes have rows" in f.message for f in report.findings)
    assert any(f.kind == "rows" and "episodes 1, which the metadata has not" in f.message for f in report.findings)
    assert all(f.warning for f in report.findings if f.kind in ("video", "rows"))


def test_a_damaged_frame_in_the_middle_needs_all_frames(v21, copy_of):
    root = copy_of(v21)
    path = root / V2_SCENE
    with av.open(str(path)) as container:
        entry = container.streams.video[0].index_entries[20]
        start, size = entry.pos, entry.size
    data = bytearray(path.read_bytes())
    data[start : start + size] = bytes(size)
    path.write_bytes(bytes(data))
    found = [f for f in check(root, frames="all").errors if f.kind == "video"]
    assert found and found[0].episode == 3 and "Cannot decode frame" in found[0].message


@pytest.mark.parametrize(
    ("plant", "kind", "episode", "text"),
    [
        (lambda f: f["action"].__setitem__((3, 1), np.nan), "values", 1, "'action' has NaN in 1 rows, first frame 3"),
        (lambda f: shorter(f, "observations/qpos", 5), "rows", 1, "has 78 actions but 73 states"),
        (lambda f: shorter(f, "observations/images/cam_high", 2), "video", 1, "has 76 frames for 78 rows"),
        (lambda f: f["observations/images/cam_high"].__setitem__((0, slice(None)), 0), "video", 1, "Cannot decode"),
        (lambda f: f.__delitem__("action"), "files", None, "lacks action"),
    ],
)
def test_hdf5_defects(aloha, copy_of, plant, kind, episode, text):
    root = copy_of(aloha)
    with h5py.File(root / "episode_1.hdf5", "r+") as file:
        plant(file)
    report = check(root, format="hdf5_datasets")
    hits = [f for f in report.errors if f.kind == kind and f.episode == episode and text in f.message]
    assert len(hits) == 1 and "episode_1.hdf5" in hits[0].file, "\n".join(report.lines())
    assert main(["check", str(root)]) == 1
    with pytest.raises(UserError, match=r"episode_1\.hdf5"):
        dataset = open_dataset(root, format="hdf5_datasets")
        dataset.get_many(list(range(91, 169)), DataNeeds())


def shorter(file, name, count):
    values = file[name][()]
    del file[name]
    file[name] = values[: len(values) - count]


def test_hdf5_duplicates_and_constants(aloha, copy_of):
    root = copy_of(aloha)
    shutil.copy(root / "episode_0.hdf5", root / "episode_2.hdf5")
    for number in range(3):
        with h5py.File(root / f"episode_{number}.hdf5", "r+") as file:
            file["action"][:, 0] = 1.0
    report = check(root, format="hdf5_datasets")
    kinds = {(f.kind, f.episode) for f in report.errors}
    assert kinds == {("duplicates", 2), ("constant", None)}


def test_what_is_no_dataset_is_a_usage_error(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert "not a LeRobot dataset" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "absent")]) == 2
    assert main(["check", str(tmp_path), "--frmaes", "all"]) == 2
    assert "did you mean '--frames'" in capsys.readouterr().err
