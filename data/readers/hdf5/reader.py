"""The reader of HDF5 datasets: vectors in memory, frames from open files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from vlaforge.data.dataset import Camera, Dataset, DatasetInfo, Episode
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.readers.hdf5.files import Hdf5Pool, picture
from vlaforge.data.readers.hdf5.recordings import Collection, Recording
from vlaforge.data.readers.selection import select
from vlaforge.data.readers.windows import window
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, IMAGES, STATE, TASK, DataNeeds, Sample


class Hdf5Reader(Dataset):
    """The recordings of `collection` as a dataset; see `vlaforge.data.readers.open_dataset` for the arguments."""

    def __init__(
        self, path: Path, collection: Collection, episodes: Sequence[int] | str | None = None, split: str = "train"
    ):
        self.root, self.collection = path, collection
        if not collection.recordings:
            raise UserError(f"{path} holds no HDF5 recordings.")
        self.notes = list(collection.notes)
        self._pool = Hdf5Pool()
        _check_alike(collection.recordings)
        starts = np.cumsum([0, *(recording.length for recording in collection.recordings)]).tolist()
        known = list(range(len(collection.recordings)))
        chosen = select(known, episodes, split, collection.splits or {})
        self.recordings = {number: collection.recordings[number] for number in chosen}
        self.episodes = [
            Episode(number, recording.length, starts[number], (recording.task,) if recording.task else ())
            for number, recording in self.recordings.items()
        ]
        texts = dict.fromkeys(recording.task for recording in collection.recordings)
        self._task_numbers = {task: number for number, task in enumerate(texts)}
        self.info = self._describe()

    def _describe(self) -> DatasetInfo:
        first = next(iter(self.recordings.values()))
        cameras = {}
        for name in first.cameras:
            height, width, _ = self.picture(self.episodes[0], name, 0).shape
            cameras[name] = Camera(name, height, width, "image")
        return DatasetInfo(
            path=self.root,
            format="hdf5_datasets",
            version=self.collection.layout,
            fps=self.collection.fps,
            cameras=cameras,
            state_dim=0 if first.state is None else first.state.shape[1],
            action_dim=first.action.shape[1],
            state_names=self.collection.state_names,
            action_names=self.collection.action_names,
            robot_type=self.collection.robot_type,
        )

    def get(self, position: int, needs: DataNeeds) -> Sample:
        episode, frame = self.locate(position)
        recording = self.recordings[episode.index]
        sample: Sample = {
            "episode_index": episode.index,
            "frame_index": frame,
            "index": episode.start + frame,
            "dataset_index": 0,
            "timestamp": frame / self.info.fps,
            "task_index": self._task_numbers[recording.task],
            TASK: recording.task,
        }
        self._add_vectors(sample, recording, frame, needs)
        for name in self.info.cameras if needs.cameras is None else needs.cameras:
            if name not in self.info.cameras:
                raise unknown("camera", name, self.info.cameras)
            steps, pad = window(frame, needs.image_offsets, recording.length)
            frames = [self.picture(episode, name, step) for step in steps.tolist()]
            sample[IMAGES + name] = np.stack(frames) if len(frames) > 1 else frames[0]
            if len(frames) > 1:
                sample[f"{IMAGES}{name}_is_pad"] = pad
        return sample

    def _add_vectors(self, sample: Sample, recording: Recording, frame: int, needs: DataNeeds) -> None:
        steps, pad = window(frame, needs.action_offsets, recording.length)
        sample[ACTION], sample[ACTION_IS_PAD] = recording.action[steps], pad
        if recording.state is not None:
            steps, pad = window(frame, needs.state_offsets, recording.length)
            sample[STATE] = recording.state[steps] if len(steps) > 1 else recording.state[steps[0]]
            if len(steps) > 1:
                sample[f"{STATE}_is_pad"] = pad

    def picture(self, episode: Episode, camera: str, row: int) -> np.ndarray:
        """uint8 [H, W, 3] of one row of an episode. DecodeError names file and row."""
        frames = self._frames(episode, camera)
        return picture(frames, row, f"{frames.file.filename}:{frames.name}, row {row}")

    def cell(self, episode: Episode, camera: str, row: int) -> np.ndarray:
        """What the file holds for that row: raw pixels [H, W, C], or the bytes of an encoded picture [n]."""
        return self._frames(episode, camera)[row]

    def _frames(self, episode: Episode, camera: str) -> h5py.Dataset:
        recording = self.recordings[episode.index]
        return self._pool.file(recording.file)[f"{recording.group}/{recording.cameras[camera]}"]

    def column(self, key: str, episode: Episode) -> np.ndarray:
        recording = self.recordings[episode.index]
        own = {ACTION: recording.action, STATE: recording.state}
        if own.get(key) is not None:
            return own[key]
        holder = self._pool.file(recording.file)[recording.group or "/"]
        if key not in holder:
            raise unknown("column", key, [ACTION, STATE, *holder])
        return holder[key][()]

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for number, recording in self.recordings.items():
            name = recording.file.name
            digest.update(f"{number}:{name}:{recording.file.stat().st_size}:{recording.group};".encode())
            for values in (recording.action, recording.state):
                if values is not None:
                    digest.update(np.ascontiguousarray(values))
        return digest.hexdigest()


def _check_alike(recordings: Sequence[Recording]) -> None:
    """Same cameras and sizes of action and state in all recordings, state and frames for each action, or UserError."""
    first = recordings[0]
    for recording in recordings:
        where = f"{recording.file}:/{recording.group}"
        if recording.length == 0:
            raise UserError(f"{where} holds no rows.")
        if set(recording.cameras) != set(first.cameras):
            raise UserError(
                f"{where} has the cameras {', '.join(recording.cameras) or '(none)'}, but {first.file} has "
                f"{', '.join(first.cameras) or '(none)'}."
            )
        for camera, count in recording.frames.items():
            if count < recording.length:
                raise UserError(f"{where}: camera '{camera}' has {count} frames for {recording.length} rows.")
        for what, values, like in (("action", recording.action, first.action), ("state", recording.state, first.state)):
            if (values is None) != (like is None):
                raise UserError(f"{where}: the {what} is in some recordings and not in others.")
            if values is not None and not np.isfinite(values).all():
                frame = int(np.argwhere(~np.isfinite(values))[0, 0])
                raise UserError(
                    f"{where}: the {what} is NaN or infinite at row {frame}: repair it, or remove the file."
                )
            if values is not None and values.shape != (recording.length, like.shape[1]):
                raise UserError(
                    f"{where}: the {what} has shape {list(values.shape)}; expected "
                    f"[{recording.length}, {like.shape[1]}]."
                )
