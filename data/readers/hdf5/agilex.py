"""AgileX recordings as X-VLA trains on them: two arms, each with its own clock, resampled to evenly spaced points.

``observations/eef_quaternion`` [T, 16] holds, for the left and then the right arm, position (3), quaternion x y z w
(4) and gripper (1); ``eef_left_time`` and ``eef_right_time`` [T] are the arms' clocks in seconds. An arm becomes 10
numbers: position, the first two columns of its rotation matrix row by row, and whether the gripper is closed. A sample
at row t takes horizon + 1 points, evenly from the time of t to 2 s later or to the end, whichever is first: the first
is the state, the others are the action, so near the end the steps are shorter and nothing is padding.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import h5py
import numpy as np

from vlaforge.data import rotation
from vlaforge.data.dataset import Episode
from vlaforge.data.errors import UserError
from vlaforge.data.readers.hdf5.files import frame_counts, hdf5_files, open_hdf5, text_of
from vlaforge.data.readers.hdf5.reader import Hdf5Reader
from vlaforge.data.readers.hdf5.recordings import Collection, Options, Recording
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, STATE, DataNeeds, Sample

NAME, FPS = "agilex", 30.0
HOLDS = "observations/eef_quaternion [T, 16] and a metadata.json beside the recordings"
POSES = "observations/eef_quaternion"
WINDOW_S, STRIDE, TAIL = 2.0, 2, 30  # seconds of a sample; rows between samples; rows at the end that start none
STILL = 1e-5  # a start where no coordinate of either arm changes by more, from one point to the next, is left out
ARM_NAMES = ("x", "y", "z", "r00", "r01", "r10", "r11", "r20", "r21", "gripper_closed")


@dataclass(frozen=True)
class Arms:
    """One recording's trajectory: poses float32 [T, 10] and clocks float64 [T] of the left and the right arm."""

    poses: tuple[np.ndarray, np.ndarray]
    clocks: tuple[np.ndarray, np.ndarray]

    @cached_property
    def time(self) -> np.ndarray:
        """The recording's clock [T]: the mean of the arms'."""
        return (self.clocks[0] + self.clocks[1]) / 2

    def points(self, row: int, count: int) -> np.ndarray:
        """float32 [count, 20]: evenly spaced in time from `row`, over `WINDOW_S` or to the end."""
        start = self.time[row]
        times = np.linspace(start, min(start + WINDOW_S, self.time[-1]), count, dtype=np.float32).astype(np.float64)
        arms = [_interpolate(clock, pose, times) for clock, pose in zip(self.clocks, self.poses)]
        return np.concatenate(arms, axis=1).astype(np.float32)


def matches(file: h5py.File) -> bool:
    poses = file.get(POSES)
    return isinstance(poses, h5py.Dataset) and poses.ndim == 2 and poses.shape[1] == 16


def files(path: Path) -> list[Path]:
    return _listing(path)[1]


def collect(path: Path, options: Options) -> Collection:
    meta, listed = _listing(path)
    keys = meta.get("observation_key") or ["observations/images/cam_high"]
    robot = meta.get("robot_type") or meta.get("dataset_name") or "AIR-AGILEX"
    language = options.language_key or meta.get("language_instruction_key") or "language_instruction"
    recordings, arms = [], []
    for name in listed:
        with open_hdf5(name) as file:
            if not matches(file):
                raise UserError(f"{name} is not an AgileX recording: it lacks {HOLDS}.")
            missing = [key for key in keys if key not in file]
            if missing:
                raise UserError(f"{name} lacks {', '.join(missing)}, which metadata.json names.")
            arms.append(read_arms(file))
            values = np.concatenate(arms[-1].poses, axis=1)
            cameras = {key.rsplit("/", 1)[-1]: key for key in keys}
            task = text_of(file.get(language)) or ""
            frames = frame_counts(file, cameras)
            recordings.append(Recording(name, "", len(values), task, cameras, values, values, frames))
    names = tuple(f"{side}_{name}" for side in ("left", "right") for name in ARM_NAMES)
    return Collection(NAME, recordings, options.fps or FPS, names, names, robot, extra=arms)


def _listing(path: Path) -> tuple[dict, list[Path]]:
    """(metadata, recordings): those of ``datalist``, relative to the folder, else all files of the folder.

    Where `path` is one recording, that one, with the metadata beside it.
    """
    root = path if path.is_dir() else path.parent
    for candidate in [root / "metadata.json", *sorted(root.glob("*.json"))]:
        if not candidate.is_file():
            continue
        try:
            meta = json.loads(candidate.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{candidate} is not valid JSON: {error}.") from None
        if isinstance(meta, dict) and meta.get("datalist"):
            listed = [entry if isinstance(entry, str) else entry[0] for entry in meta["datalist"]]
            return meta, [path] if path.is_file() else [root / entry for entry in listed]
        if isinstance(meta, dict) and "dataset_name" in meta:
            return meta, hdf5_files(path)
    return {}, hdf5_files(path)


def read_arms(file: h5py.File) -> Arms:
    """The trajectory of an open recording; without clocks, row n is at n / 30 s."""
    raw = file[POSES][()]
    poses = tuple(_pose(raw[:, first : first + 8]) for first in (0, 8))
    plain = np.arange(len(raw)) / FPS
    clocks = []
    for side in ("left", "right"):
        clock = file.get(f"observations/eef_{side}_time")
        values = plain if clock is None else np.asarray(clock[()], np.float64)
        if values.shape != (len(raw),) or not (np.diff(values) > 0).all():
            raise UserError(f"{file.filename}: eef_{side}_time is not {len(raw)} ascending times.")
        clocks.append(values)
    return Arms(poses, tuple(clocks))


def _pose(raw: np.ndarray) -> np.ndarray:
    """[T, 8] → float32 [T, 10]. The gripper counts as closed where its opening times 50 is under 1."""
    turned = rotation.convert(raw[:, 3:7], "quaternion", "rot6d_pairs")
    closed = raw[:, 7:8] * 50 < 1.0
    return np.concatenate([raw[:, :3], turned, closed], axis=1).astype(np.float32)


def _interpolate(clock: np.ndarray, values: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Linear in each column of `values` [T, D] float32; before the first and after the last row, that row."""
    times = np.clip(times, clock[0], clock[-1])
    below = np.clip(np.searchsorted(clock, times) - 1, 0, len(clock) - 2)
    slope = (values[below + 1] - values[below]) / (clock[below + 1] - clock[below])[:, None]
    return slope * (times - clock[below])[:, None] + values[below]


class AgilexReader(Hdf5Reader):
    """Samples start at every second row that has 30 rows after it, where an arm moves."""

    def __init__(self, path: Path, collection: Collection, episodes=None, split: str = "train"):
        super().__init__(path, collection, episodes, split)
        self._arms: Sequence[Arms] = collection.extra

    @cached_property
    def _rows(self) -> list[list[int]]:
        """For each chosen episode, the rows where a sample starts."""
        arms = [self._arms[episode.index] for episode in self.episodes]
        return [
            [
                row
                for row in range(0, len(arm.time) - TAIL, STRIDE)
                if np.abs(np.diff(arm.points(row, TAIL + 1)[:2], axis=0)).max() >= STILL
            ]
            for arm in arms
        ]

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(len(rows) for rows in self._rows))

    def locate(self, position: int) -> tuple[Episode, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside 0..{len(self) - 1}")
        number = bisect_right(self.ends, position)
        rows = self._rows[number]
        return self.episodes[number], rows[position - (self.ends[number] - len(rows))]

    def _add_vectors(self, sample: Sample, recording: Recording, frame: int, needs: DataNeeds) -> None:
        points = self._arms[sample["episode_index"]].points(frame, len(needs.action_offsets) + 1)
        sample[STATE], sample[ACTION] = points[0], points[1:]
        sample[ACTION_IS_PAD] = np.zeros(len(points) - 1, bool)
