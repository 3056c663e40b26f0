"""Small datasets of every format, and a maker of tiny ones whose frames tell their own number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlaforge.data.convert.summary import Pixels
from vlaforge.data.convert.writer import Limits, NewEpisode, V30Writer
from vlaforge.data.readers.lerobot.layouts import V21
from vlaforge.data.readers.lerobot.stored import merge_episodes

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
SIDE, BITS = 64, 12


@pytest.fixture(scope="session")
def v21() -> Path:
    """LeRobot v2.1: the rows of the bundled v3.0 dataset, with H.264 videos."""
    return SAMPLES / "metaworld_v21"


@pytest.fixture(scope="session")
def v20(v21, tmp_path_factory) -> Path:
    """The same as v2.0: one stats.json instead of statistics by episode."""
    root = shutil.copytree(v21, tmp_path_factory.mktemp("v20") / "metaworld_v20")
    info = json.loads((root / "meta/info.json").read_text())
    merged = merge_episodes(V21(root, info).episode_statistics())
    plain = {key: {name: value.tolist() for name, value in entry.items()} for key, entry in merged.items()}
    (root / "meta/stats.json").write_text(json.dumps(plain))
    (root / "meta/episodes_stats.jsonl").unlink()
    (root / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v2.0"}))
    return root


@pytest.fixture(scope="session")
def aloha() -> Path:
    return SAMPLES / "metaworld_aloha_hdf5"


@pytest.fixture(scope="session")
def agilex() -> Path:
    return SAMPLES / "metaworld_agilex_hdf5"


@pytest.fixture(scope="session")
def robomimic(aloha, tmp_path_factory) -> Path:
    """The ALOHA recordings as one robomimic file with raw frames."""
    from vlaforge.data.readers.hdf5.files import picture

    path = tmp_path_factory.mktemp("robomimic") / "demos.hdf5"
    with h5py.File(path, "w") as file:
        for number in range(2):
            with h5py.File(aloha / f"episode_{number}.hdf5") as source:
                demo = file.create_group(f"data/demo_{number}")
                demo["actions"] = source["action"][()]
                demo["obs/ee_pos"], demo["obs/gripper_states"] = np.split(source["observations/qpos"][()], [3], axis=1)
                demo.attrs["num_samples"] = len(demo["actions"])
                demo.attrs["language_instruction"] = source["language_instruction"][()]
                frames = source["observations/images/cam_high"]
                demo["obs/agentview_rgb"] = np.stack([picture(frames, row, "") for row in range(len(frames))])
        file["data"].attrs["env_args"] = json.dumps({"env_kwargs": {"control_freq": 80}})
        file["mask/train"], file["mask/valid"] = [b"demo_0"], [b"demo_1"]
    return path


@pytest.fixture
def copy_of(tmp_path) -> Callable[[Path], Path]:
    """Copies a dataset, so that a test may damage it."""
    return lambda source: Path(shutil.copytree(source, tmp_path / source.name))


# ---------------------------------------------------------------------------------------------------- numbered frames


def draw_number(number: int) -> np.ndarray:
    """uint8 [SIDE, SIDE, 3] whose 4 x 3 blocks are the bits of `number`."""
    bits = np.array([number >> bit & 1 for bit in range(BITS)], np.uint8).reshape(4, 3)
    grey = np.kron(bits, np.ones((SIDE // 4, SIDE // 3 + 1), np.uint8))[:SIDE, :SIDE] * 200 + 20
    return np.repeat(grey[..., None], 3, axis=2)


def read_number(frame: np.ndarray) -> int:
    """The number that `draw_number` drew, from a decoded frame."""
    rows, columns = SIDE // 4, SIDE // 3 + 1
    bits = [
        frame[r * rows + rows // 2, c * columns + columns // 2 - 2].mean() > 120 for r in range(4) for c in range(3)
    ]
    return sum(1 << bit for bit, value in enumerate(bits) if value)


def write_video(
    path: Path,
    numbers: Sequence[int],
    fps: int = 30,
    times: Sequence[int] | None = None,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    container: dict[str, str] | None = None,
    **options: str,
) -> None:
    """Numbered frames, H.264 if not told otherwise; `times` (in frames) gives some other timing than one after
    another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=container or {}) as output:
        stream = output.add_stream(codec, rate=fps, options={"crf": "18", "g": "12", "bf": "2", **options})
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, pix_fmt
        for at, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(draw_number(number), format="rgb24")
            frame.pts, frame.time_base = (at if times is None else times[at]), Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


class Numbers:
    """`draw_number`, `read_number` and `write_video`, for tests that cannot import this file."""

    draw, read, write = staticmethod(draw_number), staticmethod(read_number), staticmethod(write_video)


@pytest.fixture(scope="session")
def numbers() -> type[Numbers]:
    return Numbers


@pytest.fixture
def tiny(tmp_path) -> Callable[..., Path]:
    """Makes a v3.0 dataset of one camera whose frame n of the whole shows n, action and state from it.

    `tiny(lengths, data_mb=..., video_mb=...)`: small limits give many files. Row n has action [n, -n, frame].
    """

    def make(
        lengths: Sequence[int], fps: int = 30, name: str = "tiny", tasks: Sequence[str] = ("push", "pull"), **mb: float
    ) -> Path:
        root = tmp_path / name
        features = {
            "observation.images.front": {"dtype": "video", "shape": [SIDE, SIDE, 3], "names": ["h", "w", "c"]},
            "observation.state": {"dtype": "float32", "shape": [2], "names": ["a", "b"]},
            "action": {"dtype": "float32", "shape": [3], "names": None},
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **{key: {"dtype": "int64", "shape": [1], "names": None}
               for key in ("frame_index", "episode_index", "index", "task_index")},
        }  # fmt: skip
        writer = V30Writer(root, features=features, fps=fps, tasks=tasks, robot_type="toy", limits=Limits(**mb))
        start = 0
        for index, length in enumerate(lengths):
            video = tmp_path / f"{name}-{index}.mp4"
            write_video(video, range(start, start + length), fps)
            rows, frames = np.arange(start, start + length), np.arange(length)
            columns = {
                "observation.state": np.stack([rows, rows % 5], 1).astype(np.float32),
                "action": np.stack([rows, -rows, frames], 1).astype(np.float32),
                "timestamp": (frames / fps).astype(np.float32),
                "frame_index": frames,
                "task_index": np.full(length, index % len(tasks)),
            }
            pixels = Pixels()
            pixels.add(draw_number(start)[None])
            table = pa.table({key: pa.array(list(value)) for key, value in columns.items()})
            key = "observation.images.front"
            writer.add(NewEpisode(table, (tasks[index % len(tasks)],), {key: video}, {key: pixels}, columns))
            start += length
        writer.finish()
        return root

    return make


# ---------------------------------------------------------------------------------------------------- damage


class Damage:
    """Changes to a dataset on disk, for copies."""

    @staticmethod
    def table(path: Path, key: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replaces column `key` of a parquet file by `change` of it, [rows] or [rows, D]; row groups are kept."""
        table = pq.read_table(path)
        field = table.schema.field(key)
        values = np.array(table[key].to_pylist())
        changed = pa.array(change(values).tolist(), field.type)
        at = table.schema.get_field_index(key)
        pq.write_table(table.set_column(at, field, changed), path)

    @staticmethod
    def json(path: Path, change: Callable[[dict], None]) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    @staticmethod
    def lines(path: Path, change: Callable[[list[dict]], list[dict]]) -> None:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("\n".join(map(json.dumps, change(lines))) + "\n")


@pytest.fixture(scope="session")
def damage() -> type[Damage]:
    return Damage
