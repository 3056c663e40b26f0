"""Conversions: the same content in the new format, the source untouched, and the goal whole or absent."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from vlaforge.data.check import check
from vlaforge.data.convert import Conversion, convert
from vlaforge.data.convert.summary import Pixels
from vlaforge.data.convert.writer import Limits, V30Writer
from vlaforge.data.errors import UserError
from vlaforge.data.readers import open_dataset
from vlaforge.data.readers.hdf5.recordings import Options
from vlaforge.data.schema import DataNeeds
from vlaforge.runtime.commands.data import main

NEEDS = DataNeeds(action_offsets=(0, 1, 7), image_offsets=(0, 2))


def tree(root: Path) -> dict[str, str]:
    """A hash of every file under `root`."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def quiet(message: str) -> None:
    pass


def same(first, second, positions) -> None:
    for a, b in zip(first.get_many(positions, NEEDS), second.get_many(positions, NEEDS)):
        assert set(a) == set(b)
        for key, value in a.items():
            np.testing.assert_array_equal(value, b[key], err_msg=key)


@pytest.mark.parametrize("limits", [Limits(), Limits(data_mb=0.003, video_mb=0.02, chunk=2)])
def test_v21_to_v30_copies_every_frame_bit_for_bit(v21, tmp_path, limits):
    before, goal = tree(v21), tmp_path / "new"
    convert(v21, goal, Conversion(limits=limits), quiet)
    assert tree(v21) == before and [path.name for path in tmp_path.iterdir()] == ["new"]
    old, new = open_dataset(v21), open_dataset(goal)
    assert new.info.version == "v3.0" and new.info.robot_type == "sawyer" and len(new) == len(old)
    several = limits.chunk == 2
    assert len(list(goal.rglob("*.mp4"))) == (12 if several else 2)
    assert len(list((goal / "data").rglob("*.parquet"))) == (6 if several else 1)
    positions = [e.start + n for e in old.episodes for n in (0, 1, e.length // 2, e.length - 1)]
    same(old, new, positions)
    assert check(goal, frames="all").errors == []


def test_v20_to_v21_to_v30(v20, v21, tmp_path):
    convert(v20, tmp_path / "v21", Conversion(target="v2.1"), quiet)
    convert(tmp_path / "v21", tmp_path / "v30", Conversion(), quiet)
    middle, end = open_dataset(tmp_path / "v21"), open_dataset(tmp_path / "v30")
    assert (middle.info.version, end.info.version) == ("v2.1", "v3.0")
    same(open_dataset(v20), middle, [0, 200, 452])
    same(open_dataset(v20), end, [0, 200, 452])
    stored = open_dataset(v21).stored_statistics()
    for key in ("action", "observation.state"):
        for name in ("mean", "std", "min", "max"):
            np.testing.assert_allclose(middle.stored_statistics()[key][name], stored[key][name], atol=1e-6)
    assert not (tmp_path / "v21/meta/stats.json").exists()


def test_statistics_are_of_the_whole(v21, tmp_path):
    """True quantiles; LeRobot averages those of the episodes."""
    convert(v21, tmp_path / "new", Conversion(), quiet)
    dataset = open_dataset(tmp_path / "new")
    rows = np.concatenate([dataset.column("action", e) for e in dataset.episodes]).astype(np.float64)
    stored = dataset.stored_statistics()["action"]
    for name, share in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99)):
        np.testing.assert_allclose(stored[name], np.quantile(rows, share, axis=0), atol=1e-12)
    picture = dataset.stored_statistics()["observation.images.scene"]
    assert picture["mean"].shape == (3,) and 0.4 < picture["mean"].mean() < 0.7


def test_pixel_counts_give_exact_statistics():
    pictures = np.random.default_rng(0).integers(0, 256, (4, 9, 7, 3), dtype=np.uint8)
    first, second = Pixels(), Pixels()
    first.add(pictures[:1])
    second.add(pictures[1:])
    first.merge(second)
    found, values = first.result(), pictures.reshape(-1, 3) / 255
    np.testing.assert_allclose(found["mean"].reshape(3), values.mean(0))
    np.testing.assert_allclose(found["std"].reshape(3), values.std(0))
    np.testing.assert_allclose(found["min"].reshape(3), values.min(0))
    np.testing.assert_allclose(found["q90"].reshape(3), np.quantile(values, 0.9, axis=0, method="inverted_cdf"))
    assert found["count"].tolist() == [4]


@pytest.mark.parametrize("cameras", ["image", "video"])
def test_hdf5_to_v30(request, tmp_path, cameras):
    """Vectors and texts exactly; kept pictures exactly, encoded ones up to the codec."""
    for source in ("aloha", "robomimic", "agilex"):
        path, goal = request.getfixturevalue(source), tmp_path / source
        how = Conversion(format="hdf5_datasets", cameras=cameras, options=Options(fps=25), codec="libx264", crf=10)
        convert(path, goal, how, quiet)
        old, new = open_dataset(path, format="hdf5_datasets", split="all"), open_dataset(goal)
        assert new.info.fps == 25 and len(new.episodes) == 2
        for episode, copy in zip(old.episodes, new.episodes):
            assert copy.tasks == episode.tasks
            for key in ("action", "observation.state"):
                np.testing.assert_array_equal(old.column(key, episode), new.column(key, copy))
            for frame in (0, episode.length - 1):
                sample = new.get(copy.start + frame, DataNeeds())
                assert sample["task"] == episode.tasks[0] and sample["timestamp"] == pytest.approx(frame / 25, abs=1e-6)
                for name in old.info.cameras:
                    off = np.abs(sample[f"observation.images.{name}"].astype(int) - old.picture(episode, name, frame))
                    assert off.mean() <= (0 if cameras == "image" else 3), name
        assert (goal / "videos").exists() == (cameras == "video")


def test_jpegs_are_kept_as_recorded(aloha, tmp_path):
    convert(aloha, tmp_path / "new", Conversion(format="hdf5_datasets", cameras="image"), quiet)
    cells = pq.read_table(tmp_path / "new/data/chunk-000/file-000.parquet")["observation.images.cam_high"]
    dataset = open_dataset(aloha, format="hdf5_datasets")
    assert cells[5].as_py()["bytes"] == bytes(dataset.cell(dataset.episodes[0], "cam_high", 5))


def test_gaps_in_the_numbers_are_closed(v21, copy_of, damage, tmp_path):
    """A dataset that lost episode 2: v3.0 numbers episodes and rows without gaps."""
    root = copy_of(v21)
    damage.lines(root / "meta/episodes.jsonl", lambda lines: [line for line in lines if line["episode_index"] != 2])
    damage.lines(root / "meta/episodes_stats.jsonl", lambda lines: [x for x in lines if x["episode_index"] != 2])
    damage.json(root / "meta/info.json", lambda info: info.update(total_episodes=5, total_frames=390))
    for number in (3, 4, 5):
        path = root / f"data/chunk-000/episode_{number:06d}.parquet"
        damage.table(path, "index", lambda values: values - 63)
    convert(root, tmp_path / "new", Conversion(), quiet)
    old, new = open_dataset(root, split="all"), open_dataset(tmp_path / "new")
    assert [e.index for e in old.episodes] == [0, 1, 3, 4, 5] and [e.index for e in new.episodes] == [0, 1, 2, 3, 4]
    for position in (0, 178, 179, 389):
        a, b = old.get(position, NEEDS), new.get(position, NEEDS)
        for key in ("action", "observation.images.scene", "task", "index"):
            np.testing.assert_array_equal(a[key], b[key])


def test_videos_that_cannot_be_joined_get_files_of_their_own(v21, copy_of, tmp_path):
    """One episode encoded with other settings: its packets do not fit into the same file."""
    root = copy_of(v21)
    path = root / "videos/chunk-000/observation.images.scene/episode_000002.mp4"
    with av.open(str(path)) as source:
        frames = [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=80, options={"crf": "20", "profile": "baseline"})
        stream.width, stream.height = 128, 128
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode(None))
    convert(root, tmp_path / "new", Conversion(), quiet)
    assert len(list((tmp_path / "new/videos/observation.images.scene").rglob("*.mp4"))) == 3
    same(open_dataset(root), open_dataset(tmp_path / "new"), [0, 178, 179, 241, 242, 452])


# ---------------------------------------------------------------------------------------------------- safety


def test_nothing_is_ever_written_into_a_dataset(v21, aloha, copy_of, tmp_path, capsys):
    root, recordings = copy_of(v21), copy_of(aloha)
    before = tree(root), tree(recordings)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    (tmp_path / "a file").write_text("mine")
    wrong = [
        (["convert", root, root], "is the dataset itself"),
        (["convert", root, root / "meta/new"], "lies inside the dataset"),
        (["convert", root, tmp_path], "contains the dataset"),
        (["convert", root, tmp_path / "full"], "exists already"),
        (["convert", root, tmp_path / "a file"], "exists already"),
        (["convert", root, tmp_path / "new", "--to", "v2.0"], "choose from"),
        (["convert", root, tmp_path / "new", "--to", "v2.1"], "is v2.1; it cannot be converted to v2.1"),
        (["convert", recordings, tmp_path / "new", "--to", "v2.1"], "converted to v3.0, not v2.1"),
        (["convert", recordings, tmp_path / "new", "--video-codec", "libnothing"], "libnothing"),
        (["convert", recordings, tmp_path / "new", "--action-key", "acts"], "no dataset 'acts'"),
        (["convert", tmp_path / "nowhere", tmp_path / "new"], "does not exist"),
        (["inspect", root, "--episodes", "14", "--output", tmp_path / "p.html"], "no episode 14"),
        (["inspect", root, "--output", root / "page.html"], "inside the dataset"),
        (["inspect", recordings, "--output", recordings / "page.html"], "inside the dataset"),
        (["stats", root, "--output", root / "meta/stats.json"], "inside the dataset"),
        (["stats", root, "--split", "tests"], "Unknown split"),
        (["check", root, "--video-backend", "ffmpeg"], "choose from"),
    ]
    for command, message in wrong:
        assert main([str(part) for part in command]) == 2, command
        assert message in capsys.readouterr().err, command
    assert (tree(root), tree(recordings)) == before
    assert (tmp_path / "full/file").read_text() == "mine"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"full", "a file", root.name, recordings.name}


def test_a_source_with_defects_is_not_converted(v21, copy_of, tmp_path):
    root = copy_of(v21)
    (root / "videos/chunk-000/observation.images.scene/episode_000004.mp4").unlink()
    with pytest.raises(UserError, match=r"has defects: episode 4, .*episode_000004\.mp4: .* is missing"):
        convert(root, tmp_path / "new", Conversion(), quiet)
    assert not (tmp_path / "new").exists()


def test_a_kill_leaves_the_source_and_no_goal(v21, copy_of, tmp_path, monkeypatch):
    """In the middle, when one of six episodes is written."""
    root = copy_of(v21)
    before, goal = tree(root), tmp_path / "goal"
    add = V30Writer.add

    def ended(writer, episode):
        if writer._count:
            os.kill(os.getpid(), signal.SIGKILL)
        add(writer, episode)

    with monkeypatch.context() as killing:
        killing.setattr(V30Writer, "add", ended)
        process = multiprocessing.get_context("fork").Process(target=convert, args=(root, goal, Conversion(), quiet))
        process.start()
        process.join(300)
    assert list(tmp_path.glob(".goal.*.partial/data/*/*"))
    assert process.exitcode == -signal.SIGKILL and not goal.exists()
    assert tree(root) == before
    (unfinished,) = tmp_path.glob(".goal.*.partial")
    with pytest.raises(UserError, match=r"meta/info\.json is missing"):
        open_dataset(unfinished)
    said: list[str] = []
    convert(root, goal, Conversion(), said.append)
    assert any(str(unfinished) in line and "remove it" in line for line in said)
    assert len(open_dataset(goal)) == 453 and tree(root) == before


def test_an_error_midway_removes_what_was_written(v21, tmp_path, monkeypatch):
    from vlaforge.data.convert import lerobot

    def fail(writer, episode):
        raise RuntimeError("disk full")

    monkeypatch.setattr(lerobot.V30Writer, "add", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        convert(v21, tmp_path / "new", Conversion(), quiet)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- LeRobot


PEER = """
import json, sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
root, target, positions = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
dataset = LeRobotDataset("local/converted", root=root, video_backend="pyav", delta_timestamps={"action": [0.0, 1 / 80]})
found = {"length": len(dataset)}
for position in positions:
    for key, value in dataset[position].items():
        found[f"{position}/{key}"] = np.array(value) if isinstance(value, str) else value.numpy()
np.savez(target, **found)
"""


def test_lerobot_reads_it_the_same(v21, tmp_path):
    """With LeRobot's own reader, where an interpreter that has it is named."""
    python = os.environ.get("VLAFORGE_PEER_PYTHON")
    if not python:
        pytest.skip("set VLAFORGE_PEER_PYTHON to an interpreter with lerobot[dataset]")
    convert(v21, tmp_path / "new", Conversion(limits=Limits(data_mb=0.01, video_mb=0.06)), quiet)
    positions = [0, 1, 90, 91, 241, 242, 300, 452]
    command = [python, "-c", PEER, str(tmp_path / "new"), str(tmp_path / "read.npz"), json.dumps(positions)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    read, ours = np.load(tmp_path / "read.npz"), open_dataset(v21, video_backend="pyav")
    assert read["length"] == 453
    for position, sample in zip(positions, ours.get_many(positions, DataNeeds(action_offsets=(0, 1)))):
        for key in ("action", "action_is_pad", "observation.state", "task", "index", "episode_index"):
            np.testing.assert_array_equal(read[f"{position}/{key}"], sample[key])
        for name in ("scene", "wrist"):
            key = f"observation.images.{name}"
            frame = np.moveaxis(np.rint(read[f"{position}/{key}"] * 255).astype(np.uint8), 0, -1)
            np.testing.assert_array_equal(frame, sample[key])
