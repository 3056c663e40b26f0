"""Datasets whose files are missing, damaged, or say what cannot be: refused before training, with the file's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCENE = "observation.images.scene"
INFO = {
    "a list": (lambda info: [1, 2], "info.json holds a list, not an object"),
    "text": (lambda info: "x", "info.json holds text"),
    "fps as text": (lambda info: info.update(fps="80"), "fps is '80'; it must be a number above 0"),
    "fps negative": (lambda info: info.update(fps=-5), "fps is -5"),
    "fps zero": (lambda info: info.update(fps=0), "lacks fps"),
    "another fps": (lambda info: info.update(fps=30), "the metadata is wrong"),
    "unknown version": (lambda info: info.update(codebase_version="v4.0"), "supported are v2.0, v2.1, v3.0"),
    "another version": (lambda info: info.update(codebase_version="v2.1"), "look like v3.0"),
    "version as number": (lambda info: info.update(codebase_version=3), "codebase_version v3"),
    "features as list": (lambda info: info.update(features=[1]), "features is a list"),
    "feature as list": (lambda info: info["features"].update(action=[4]), "feature 'action' is a list"),
    "no dtype": (lambda info: info["features"]["action"].pop("dtype") and None, "feature 'action' lacks its dtype"),
    "dtype as number": (lambda info: info["features"]["action"].update(dtype=4), "has a number as its dtype"),
    "shape as text": (lambda info: info["features"]["action"].update(shape="4"), "has the shape '4'"),
    "shape of zeros": (lambda info: info["features"][SCENE].update(shape=[0, 0, 3]), "has the shape [0, 0, 3]"),
    "action too wide": (lambda info: info["features"]["action"].update(shape=[5]), "its rows hold 4 values"),
    "picture of two axes": (lambda info: info["features"][SCENE].update(shape=[8, 8]), "expected height, width"),
    "pictures too large": (lambda info: info["features"][SCENE].update(shape=[480, 640, 3]), "metadata says 480 x 640"),
    "paths as number": (lambda info: info.update(data_path=3), "data_path is a number"),
    "paths with other fields": (lambda info: info.update(data_path="data/{episode}.parquet"), "does not fit v3.0"),
    "paths elsewhere": (lambda info: info.update(data_path="../../nothing"), "lacks ../../nothing"),
    "splits as list": (lambda info: info.update(splits=["train"]), "splits must map names"),
    "split of words": (lambda info: info.update(splits={"train": "all"}), "Episodes 'all' cannot be read"),
    "robot as list": (lambda info: info.update(robot_type=["a"]), "robot_type is a list"),
}
STATISTICS = {
    "a list": (lambda stats: [1], "does not hold statistics by feature and name"),
    "feature as list": (lambda stats: stats.update(action=[1]), "'action' has no statistics by name"),
    "text": (lambda stats: stats["action"].update(mean="x"), "mean of 'action' is not numbers"),
    "uneven": (lambda stats: stats["action"].update(mean=[[1], [1, 2]]), "mean of 'action' is not numbers"),
    "another robot's": (lambda stats: stats["action"].update(q01=[0.0] * 7), "they belong to other data"),
}
FILES = ("meta/info.json", "meta/tasks.parquet", "meta/episodes", "data", f"videos/{SCENE}")
LINES = {
    "meta/episodes.jsonl": (
        ("[1, 2]", "is not an object with episode_index, length"),
        ('{"episode_index": "a", "length": 3}', "episode_index is 'a'; it must be an integer"),
        ('{"episode_index": 1}', "lacks length"),
        ("{", "is not valid JSON"),
    ),
    "meta/tasks.jsonl": (('{"task_index": 0, "task": 3}', "task is 3; it must be text"),),
    "meta/episodes_stats.jsonl": (
        ('{"episode_index": 0, "stats": 3}', "stats is 3; it must be an object"),
        ('{"episode_index": 0, "stats": {"action": {"mean": "x"}}}', "mean of 'action' is not numbers"),
    ),
}


@pytest.mark.parametrize("case", INFO)
def test_info(refused, rewrite, dataset, case):
    change, words = INFO[case]
    rewrite(dataset / "meta/info.json", change)
    assert words in refused("--dataset-path", str(dataset))


@pytest.mark.parametrize("case", STATISTICS)
def test_statistics(refused, rewrite, dataset, case):
    change, words = STATISTICS[case]
    rewrite(dataset / "meta/stats.json", change)
    assert words in refused("--dataset-path", str(dataset))


def test_the_checker_names_the_same(forge, rewrite, dataset):
    """What stops a run is an error of ``forge-data check``, not a trace."""
    rewrite(dataset / "meta/stats.json", STATISTICS["text"][0])
    checked = forge("check", str(dataset), "--frames", "none", tool="data")
    assert checked.code == 1 and checked.err == "" and "mean of 'action' is not numbers" in checked.out
    for case in ("a list", "fps as text", "no dtype", "splits as list"):
        original = (dataset / "meta/info.json").read_text()
        rewrite(dataset / "meta/info.json", INFO[case][0])
        checked = forge("check", str(dataset), tool="data")
        assert checked.code == 1 and checked.err == "" and INFO[case][1] in checked.out
        assert INFO[case][1] in forge("stats", str(dataset), tool="data").sentence
        (dataset / "meta/info.json").write_text(original)


@pytest.mark.parametrize("how", ["missing", "empty", "half"])
@pytest.mark.parametrize("name", FILES)
def test_files(refused, dataset, name, how):
    """The file is named, whatever became of it."""
    path = dataset / name
    path = next(p for p in sorted(path.rglob("*")) if p.is_file()) if path.is_dir() else path
    content = path.read_bytes()
    path.unlink()
    if how != "missing":
        path.write_bytes(content[: len(content) // 2] if how == "half" else b"")
    said = refused("--dataset-path", str(dataset))
    assert path.name in said or (how == "missing" and name in said), said


@pytest.mark.parametrize(("name", "line", "words"), [(n, *case) for n, cases in LINES.items() for case in cases])
def test_lines(refused, root, tmp_path, name, line, words):
    copy = tmp_path / "v21"
    shutil.copytree(root / "tests/samples/metaworld_v21", copy)
    lines = (copy / name).read_text().splitlines()
    (copy / name).write_text("\n".join([line, *lines[1:]]))
    said = refused("--dataset-path", str(copy))
    assert words in said and Path(name).name in said


def test_episodes_without_numbers(refused, dataset):
    """Metadata of v3.0 with a gap, and with text where a number belongs."""
    path = next((dataset / "meta/episodes").rglob("*.parquet"))
    table = pq.read_table(path)
    for values, words in (([None] * len(table), "gaps"), (["a"] * len(table), "type string")):
        at = table.schema.get_field_index("length")
        pq.write_table(table.set_column(at, "length", pa.array(values)), path)
        assert words in refused("--dataset-path", str(dataset))


def test_statistics_of_another_dataset_are_not_used(noted, rewrite, dataset):
    """Right in shape, wrong in value: the run computes its own and says why."""
    rewrite(dataset / "meta/stats.json", lambda stats: stats["action"].update(q01=[-9.0] * 4, q99=[9.0] * 4))
    assert "those of the dataset disagree with its data" in noted("--dataset-path", str(dataset))


def test_what_is_no_dataset(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "meta/info.json is missing" in refused("--dataset-path", str(tmp_path / "empty"))
    assert "is not a LeRobot dataset" in refused("--dataset-path", __file__)
    assert "is not a tokenizer.json that can be read" in refused("--tokenizer-path", __file__)
    assert "has no tokenizer.json" in refused("--tokenizer-path", str(tmp_path / "empty"))
    binary = tmp_path / "info"
    shutil.copytree(Path(__file__).parents[1] / "samples/metaworld_v21/meta", binary / "meta")
    (binary / "meta/episodes.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "is not text in UTF-8" in refused("--dataset-path", str(binary))
    (binary / "meta/info.json").write_text(json.dumps({}))
    assert "codebase_version (none)" in refused("--dataset-path", str(binary))
