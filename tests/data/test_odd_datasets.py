"""Datasets as people have them: read rightly, or refused in one sentence that names what is wrong."""

from __future__ import annotations

import json
import shutil
from io import BytesIO

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlaforge.data.check import check
from vlaforge.data.errors import UserError
from vlaforge.data.inspect import write_page
from vlaforge.data.readers import guess_format, open_dataset
from vlaforge.data.schema import DataNeeds
from vlaforge.data.statistics import StatisticsSpec, compute

ROWS = "data/chunk-000/file-000.parquet"
TABLE = "meta/episodes/chunk-000/file-000.parquet"
HIGH = "observations/images/cam_high"


def column(path, key, change, kind=None):
    """Replaces column `key` of a parquet file by `change` of its cells, a list."""
    table = pq.read_table(path)
    cells = table[key].to_pylist()
    change(cells)
    field = table.schema.field(key)
    table = table.set_column(table.schema.get_field_index(key), key, pa.array(cells, kind or field.type))
    pq.write_table(table, path)


def lines(name, change):
    return lambda root, damage: damage.lines(root / f"meta/{name}.jsonl", change)


def listed(length, files=False):
    """A seventh episode in the metadata, with files that hold nothing or none."""

    def plant(root, damage):
        extra = {"episode_index": 6, "tasks": [], "length": length}
        damage.lines(root / "meta/episodes.jsonl", lambda held: [*held, extra])
        if files:
            first = root / "data/chunk-000/episode_000000.parquet"
            pq.write_table(pq.read_table(first).slice(0, 0), first.with_name("episode_000006.parquet"))

    return plant


def unicode_tasks(root, damage):
    """As LeRobot writes them: not escaped. U+2028 ends a line for some readers, but not in JSON."""
    text = "Öffne die Schublade 抽屉 \u2028 zwei"
    path = root / "meta/tasks.jsonl"
    tasks = [json.loads(line) for line in path.read_text().splitlines()]
    old, tasks[0]["task"] = tasks[0]["task"], text
    path.write_text("\n".join(json.dumps(task, ensure_ascii=False) for task in tasks), encoding="utf-8-sig")
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text().replace(json.dumps(old), json.dumps(text, ensure_ascii=False)), encoding="utf-8")


def pictures(mode, broken=False):
    """The scene as pictures in the rows, of a mode of Pillow's."""

    def plant(root, damage):
        table, cells = pq.read_table(root / ROWS), []
        for row in range(table.num_rows):
            target = BytesIO()
            Image.fromarray(np.full((8, 12), row % 200, np.uint8)).convert(mode).save(target, "PNG")
            cells.append({"bytes": target.getvalue()[: 40 if broken else None], "path": None})
        struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        pq.write_table(table.append_column("observation.images.scene", pa.array(cells, struct)), root / ROWS)
        entry = {"dtype": "image", "shape": [8, 12, 3], "names": ["height", "width", "channel"]}
        damage.json(root / "meta/info.json", lambda info: info["features"].update({"observation.images.scene": entry}))
        shutil.rmtree(root / "videos/observation.images.scene")

    return plant


def double(root, damage):
    column(root / ROWS, "observation.state", lambda cells: None, pa.list_(pa.float64()))
    damage.json(root / "meta/info.json", lambda info: info["features"]["observation.state"].update(dtype="float64"))


def one_frame_of_the_last(root, damage):
    """The last episode keeps its first row."""
    path = root / "data/chunk-000/episode_000005.parquet"
    pq.write_table(pq.read_table(path).slice(0, 1), path)
    damage.lines(root / "meta/episodes.jsonl", lambda held: [*held[:-1], held[-1] | {"length": 1}])


def split_in_two(root, damage):
    """Rows and table each in two files, the rows cut inside episode 1."""
    table = pq.read_table(root / ROWS)
    pq.write_table(table.slice(0, 100), root / ROWS)
    pq.write_table(table.slice(100), root / "data/chunk-000/file-001.parquet")


def table_in_chunks(root, damage):
    table, other = pq.read_table(root / TABLE), root / "meta/episodes/chunk-001/file-000.parquet"
    other.parent.mkdir()
    pq.write_table(table.slice(0, 2), root / TABLE)
    pq.write_table(table.slice(2), other)


def hdf5(change, file="episode_1.hdf5"):
    def plant(root, damage):
        with h5py.File(root / file if root.is_dir() else root, "r+") as handle:
            change(handle)

    return plant


def put(handle, key, values):
    del handle[key]
    handle[key] = values


def cut(file, length):
    for key in ("action", "observations/qpos", HIGH, "observations/images/cam_wrist"):
        put(file, key, file[key][:length])


def rate(value):
    return hdf5(lambda file: file["data"].attrs.update(env_args=json.dumps({"env_kwargs": {"control_freq": value}})))


STATE_START = "videos/observation.images.scene/from_timestamp"
# name: (source, how to plant it, what opening says or None where it works, kind and text of an error found or None)
ODD = {
    "empty episode": ("v21", listed(0, files=True), None, ("episodes", "has length 0")),
    "empty episode without files": ("v21", listed(0), None, ("episodes", "has length 0")),
    "negative length": ("v21", listed(-3), "episode 6 has length -3", ("episodes", "has length -3")),
    "length 0 with rows": (
        "v21",
        lines("episodes", lambda held: [held[0] | {"length": 0}, *held[1:]]),
        "Episode 0 has length 0 in its metadata, but .* holds 91 rows",
        ("episodes", "has length 0"),
    ),
    "no episodes": (
        "v21",
        lambda root, damage: (root / "meta/episodes.jsonl").write_text(""),
        "the metadata lists no episodes",
        ("episodes", "lists 0"),
    ),
    "unicode": ("v21", unicode_tasks, None, None),
    "one frame": ("v21", one_frame_of_the_last, None, ("episodes", "total_frames")),
    "no start": (
        "metaworld",
        lambda root, damage: column(root / TABLE, STATE_START, lambda cells: cells.__setitem__(3, float("nan"))),
        "episode 3 of .*/meta/episodes starts at nan s",
        ("files", "starts at nan s"),
    ),
    "empty cell": (
        "metaworld",
        lambda root, damage: column(
            root / ROWS, "observation.state", lambda cells: cells.__setitem__(10, None), pa.list_(pa.float32())
        ),
        "1 of its 453 rows are empty, first 10",
        ("types", "1 of its 453 rows are empty, first 10"),
    ),
    "float64": ("metaworld", double, None, None),
    "grey": ("metaworld", pictures("L"), None, None),
    "16 bits": ("metaworld", pictures("I;16"), "mode I;16; expected 8 bits", ("files", "mode I;16")),
    "cut picture": ("metaworld", pictures("L", True), "its 40 bytes are no known", ("files", "its 40 bytes")),
    "episode over two files": ("metaworld", split_in_two, "holds 9 rows of it", ("rows", "holds 9 rows")),
    "table in chunks": ("metaworld", table_in_chunks, None, None),
    "cut file": (
        "aloha",
        lambda root, damage: (root / "episode_1.hdf5").write_bytes((root / "episode_1.hdf5").read_bytes()[:200_000]),
        "cannot be read as HDF5: .*truncated",
        ("files", "truncated"),
    ),
    "no actions": ("aloha", hdf5(lambda f: f.pop("action")), "not an ALOHA recording", ("files", "lacks action")),
    "no state in one": ("aloha", hdf5(lambda f: f.pop("observations/qpos")), "in some", ("types", "has no state")),
    "camera less": ("aloha", hdf5(lambda f: f.pop(HIGH)), "has the cameras", ("types", "has the cameras cam_wrist")),
    "frames short": (
        "aloha",
        hdf5(lambda f: put(f, HIGH, f[HIGH][:-3])),
        "camera 'cam_high' has 75 frames for 78 rows",
        ("video", "has 75 frames for 78 rows"),
    ),
    "no rows": ("aloha", hdf5(lambda f: cut(f, 0)), "holds no rows", ("episodes", "holds no rows")),
    "one row": ("aloha", hdf5(lambda f: cut(f, 1)), None, None),
    "raw of another size": (
        "aloha",
        hdf5(lambda f: put(f, HIGH, np.zeros((78, 16, 16, 3), np.uint8))),
        None,
        ("types", "camera 'cam_high' is 16 x 16, but 128 x 128 in episode 0"),
    ),
    "raw floats": (
        "aloha",
        hdf5(lambda f: put(f, HIGH, np.zeros((78, 16, 16, 3), np.float32))),
        "row 77 has dtype float32; expected uint8",
        ("video", "dtype float32"),
    ),
    "rate is text": ("robomimic", rate("fast"), None, None),
    "rate below 0": ("robomimic", rate(-3), None, None),
    "no attributes": (
        "robomimic",
        hdf5(lambda f: [held.attrs.pop(k) for held in (f["data"], *f["data"].values()) for k in list(held.attrs)]),
        None,
        None,
    ),
    "demonstration without obs": (
        "robomimic",
        hdf5(lambda f: f.pop("data/demo_1/obs")),
        "data/demo_1 lacks actions or obs",
        ("files", "data/demo_1 lacks actions or obs"),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_read_rightly_or_refused(request, tmp_path, damage, name):
    source, plant, refusal, finding = ODD[name]
    source = request.getfixturevalue(source)
    root = tmp_path / source.name
    shutil.copytree(source, root) if source.is_dir() else shutil.copy(source, root)
    plant(root, damage)
    form = guess_format(root)
    report = check(root, format=form)
    own = [f for f in report.errors if f.kind not in ("constant", "statistics")]
    if finding is None:
        assert not own, "\n".join(report.lines())
    else:
        assert any(f.kind == finding[0] and finding[1] in f.message for f in own), "\n".join(report.lines())
        assert not any("forge-data check" in f.message for f in own)
    if refusal is not None:
        with pytest.raises(UserError, match=refusal):
            read(root, form)
        return
    dataset, samples = read(root, form)
    _, whole = read(source, form)
    for got, expected in list(zip(samples, whole))[: 1 if name.startswith("one ") else 2]:  # those lose their last rows
        np.testing.assert_array_equal(got["action"], expected["action"])
        np.testing.assert_array_equal(got["observation.state"], expected["observation.state"])
    assert all(np.isfinite(sample["action"]).all() for sample in samples)
    assert set(compute(dataset, StatisticsSpec())) == {"action", "observation.state"}
    write_page(dataset, tmp_path / "page.html")


def read(root, form):
    """The dataset, and its first and last samples."""
    dataset = open_dataset(root, format=form, split="all")
    return dataset, dataset.get_many([0, len(dataset) - 1], DataNeeds((0, 1)))


def test_grey_pictures_have_three_equal_channels(metaworld, tmp_path, damage):
    root = shutil.copytree(metaworld, tmp_path / "grey")
    pictures("L")(root, damage)
    frame = open_dataset(root).get(7, DataNeeds(cameras=("scene",)))["observation.images.scene"]
    assert frame.shape == (8, 12, 3) and frame.dtype == np.uint8 and (frame == 7).all()


def test_empty_episodes_are_said(v21, tmp_path, damage):
    root = shutil.copytree(v21, tmp_path / "odd")
    listed(0)(root, damage)
    dataset = open_dataset(root, split="all")
    assert len(dataset.episodes) == 6 and "episodes without rows are left out: 6" in dataset.notes
    with pytest.raises(UserError, match="the chosen episodes have no rows"):
        open_dataset(root, episodes=[6])
