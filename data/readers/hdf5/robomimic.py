"""robomimic and LIBERO: ``data/demo_<i>`` with ``actions`` and ``obs/…``; one file, or a folder of them.

The state is not one dataset there: which observations make it is told by `state_key`, else the first of `STATES` that
fits. The rate is the simulator's control frequency where the file tells it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.readers.hdf5.files import frame_counts, hdf5_files, natural, open_hdf5, rate_of, text_of
from vlaforge.data.readers.hdf5.recordings import Collection, Options, Recording, joined

NAME, FPS = "robomimic", 20.0
HOLDS = "data/demo_<i> with actions and obs"
STATES = (
    ("obs/robot0_eef_pos", "obs/robot0_eef_quat", "obs/robot0_gripper_qpos"),
    ("obs/ee_pos", "obs/ee_ori", "obs/gripper_states"),
    ("obs/ee_pos", "obs/gripper_states"),
    ("obs/joint_states", "obs/gripper_states"),
)


files = hdf5_files


def matches(file: h5py.File) -> bool:
    data = file.get("data")
    return isinstance(data, h5py.Group) and any(_is_demo(demo) for demo in data.values())


def _is_demo(demo: object) -> bool:
    return isinstance(demo, h5py.Group) and "actions" in demo and isinstance(demo.get("obs"), h5py.Group)


def collect(path: Path, options: Options) -> Collection:
    recordings: list[Recording] = []
    splits: dict[str, list[int]] = {}
    rates, notes = set(), []
    for name in hdf5_files(path):
        with open_hdf5(name) as file:
            if not matches(file):
                raise UserError(f"{name} is not a robomimic or LIBERO file: it lacks {HOLDS}.")
            demos = sorted((demo for demo in file["data"] if _is_demo(file["data"][demo])), key=natural)
            broken = [demo for demo in file["data"] if demo.startswith("demo") and demo not in demos]
            if broken:
                raise UserError(f"{name}: data/{broken[0]} lacks actions or obs ({len(broken)} such in all).")
            numbers = {demo: len(recordings) + number for number, demo in enumerate(demos)}
            state_key = options.state_key or _state_key(file["data"][demos[0]])
            recordings += [_recording(name, file, demo, state_key, options) for demo in demos]
            for split, members in file.get("mask", {}).items():
                known = [text_of(member) for member in members[()]]
                splits.setdefault(split, []).extend(numbers[demo] for demo in known if demo in numbers)
            rates.add(_rate(file["data"].attrs))
    if not options.state_key:
        notes.append(f"state made of {state_key or 'nothing'}")
    fps = options.fps or max(rates) or FPS
    if not (options.fps or max(rates)):
        notes.append(f"the file gives no rate; {FPS:g} frames a second assumed")
    texts = {split: ",".join(map(str, numbers)) for split, numbers in splits.items()}
    return Collection(NAME, recordings, fps, splits=texts, notes=tuple(notes))


def _state_key(demo: h5py.Group) -> str | None:
    for names in STATES:
        if all(name in demo for name in names):
            return ",".join(names)
    return None


def _recording(path: Path, file: h5py.File, name: str, state_key: str | None, options: Options) -> Recording:
    demo = file["data"][name]
    action = joined(demo, options.action_key or "actions", "action", "data.action_key")
    state = joined(demo, state_key, "state", "data.state_key") if state_key else None
    cameras = {key: f"obs/{key}" for key, item in demo["obs"].items() if _is_frames(item)}
    task, frames = _task(path, file, demo, options), frame_counts(demo, cameras)
    return Recording(path, f"data/{name}", len(action), task, cameras, action, state, frames)


def _is_frames(item: object) -> bool:
    return isinstance(item, h5py.Dataset) and item.dtype == np.uint8 and item.ndim == 4


def _task(path: Path, file: h5py.File, demo: h5py.Group, options: Options) -> str:
    """The instruction: of the demonstration, of the file, or (as LIBERO names its files) from the file's name."""
    key = options.language_key or "language_instruction"
    for holder in (demo, file["data"]):
        found = text_of(holder.attrs.get(key)) or text_of(holder.get(key))
        found = found or text_of(_json(holder.attrs.get("problem_info")).get(key))
        if found:
            return found
    return path.stem.removesuffix("_demo").replace("_", " ")


def _rate(attributes: Mapping[str, Any]) -> float:
    arguments = _json(attributes.get("env_args"))
    inner = arguments.get("env_kwargs")
    return rate_of((inner if isinstance(inner, dict) else arguments).get("control_freq"))


def _json(value: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(text_of(value) or "{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
