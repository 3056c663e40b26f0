"""ALOHA: a file an episode, ``/action``, ``/observations/qpos``, ``/observations/images/<camera>``.

Frames are raw, or JPEG padded to one length. The recordings hold no rate; ALOHA robots run at 50 Hz.
"""

from __future__ import annotations

from pathlib import Path

import h5py

from vlaforge.data.errors import UserError
from vlaforge.data.readers.hdf5.files import frame_counts, hdf5_files, open_hdf5, rate_of, text_of
from vlaforge.data.readers.hdf5.recordings import Collection, Options, Recording, joined

NAME, FPS = "aloha", 50.0
HOLDS = "action, observations/qpos and observations/images/<camera>"


files = hdf5_files


def matches(file: h5py.File) -> bool:
    return "action" in file and isinstance(file.get("observations/images"), h5py.Group)


def collect(path: Path, options: Options) -> Collection:
    recordings, rates = [], set()
    for name in hdf5_files(path):
        with open_hdf5(name) as file:
            if not matches(file):
                raise UserError(f"{name} is not an ALOHA recording: it lacks {HOLDS}.")
            recordings.append(_recording(name, file, options))
            rates.add(rate_of(file.attrs.get("fps", file.attrs.get("frequency"))))
    fps = options.fps or max(rates) or FPS
    notes = [] if options.fps or max(rates) else [f"the recordings give no rate; {FPS:g} frames a second assumed"]
    if not all(recording.task for recording in recordings):
        notes.append("some recordings hold no language instruction; their task is empty")
    return Collection(NAME, recordings, fps, robot_type="aloha", notes=tuple(notes))


def _recording(name: Path, file: h5py.File, options: Options) -> Recording:
    action = joined(file, options.action_key or "action", "action", "data.action_key")
    has_state = options.state_key or "observations/qpos" in file
    state = joined(file, options.state_key or "observations/qpos", "state", "data.state_key") if has_state else None
    key = options.language_key or "language_instruction"
    task = text_of(file.get(key)) or text_of(file.attrs.get(key)) or text_of(file.attrs.get("task")) or ""
    cameras = {camera: f"observations/images/{camera}" for camera in file["observations/images"]}
    return Recording(name, "", len(action), task, cameras, action, state, frame_counts(file, cameras))
