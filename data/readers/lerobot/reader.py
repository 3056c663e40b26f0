"""The reader of LeRobot datasets: rows from arrays in memory, frames from open videos."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from vlaforge.data.dataset import Dataset, DatasetInfo, Episode
from vlaforge.data.errors import UserError, nearest, unknown
from vlaforge.data.readers.lerobot.features import dimension_names, parse_features
from vlaforge.data.readers.lerobot.images import PictureStore
from vlaforge.data.readers.lerobot.layouts import CHECK, Entry, open_layout
from vlaforge.data.readers.lerobot.opening import (
    by_number,
    check_files,
    check_finite,
    check_overlaps,
    check_width,
    without_empty,
)
from vlaforge.data.readers.lerobot.rows import Rows
from vlaforge.data.readers.lerobot.stored import merge_episodes, per_channel
from vlaforge.data.readers.selection import select
from vlaforge.data.readers.windows import window
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, IMAGES, STATE, TASK, DataNeeds, Sample
from vlaforge.data.video import Choice, VideoPool, choose_backend

_BOOKKEEPING = ("task_index", "timestamp")


class LeRobotReader(Dataset):
    """LeRobot v2.0, v2.1 or v3.0 at `path`; see `vlaforge.data.readers.open_dataset` for the arguments."""

    def __init__(
        self,
        path: Path,
        *,
        version: str | None = None,
        episodes: Sequence[int] | str | None = None,
        split: str = "train",
        video_backend: str | None = None,
        action_key: str = ACTION,
        state_key: str = STATE,
        language_key: str | None = None,
        image_layout: str | None = None,
        open_videos: int = 64,
    ):
        self.root, self.layout = path, open_layout(path, version)
        info = self.layout.info
        self.features = parse_features(info["features"], image_layout)
        entries = self.layout.entries(self.features.videos)
        by_index = by_number(path, entries)
        check_overlaps(path, entries)
        chosen = select(list(by_index), episodes, split, info.get("splits") or {})
        self.entries, self.notes = without_empty(path, [by_index[index] for index in chosen])
        self.episodes = [Episode(e.index, e.length, e.start, e.tasks, e.extra) for e in self.entries]
        check_files(path, self.entries)
        self.rows = Rows(path, self.entries)
        self._keys = {ACTION: _columns(action_key), STATE: _columns(state_key)}
        self._load()
        self._tasks, self._language = self.layout.tasks(), language_key
        self._texts = self._task_texts()
        self.video = self._probe(video_backend)
        self.notes += [self.video.note] if self.video else []
        self._pool = VideoPool(self.video.backend if self.video else "", float(info["fps"]), open_videos)
        self._pictures = PictureStore(path, {self.features.camera_keys[n]: x for n, x in self.features.layouts.items()})
        self.info = self._describe(info)

    # ------------------------------------------------------------------------------------------------ opening

    def _load(self) -> None:
        """Reads the columns that samples need, all in one pass."""
        names = self.rows.schema.names
        wanted = [key for key in _BOOKKEEPING if key in names]
        for what, keys in self._keys.items():
            present = [key for key in keys if key in names]
            if len(present) == len(keys):
                wanted += keys
            elif keys != (what,):
                raise unknown("column", next(key for key in keys if key not in names), names)
            else:
                self._keys[what] = ()
        self.rows.load(list(dict.fromkeys(wanted)))
        self._values = {what: self._joined(what) for what in self._keys if self._keys[what]}
        for what, values in self._values.items():
            check_finite(self.root, what, values, self.entries, self.rows.offsets)
            check_width(self.root, self._keys[what], self.features.columns, values)
        if ACTION not in self._values and (close := nearest(ACTION, names)):
            raise UserError(
                f"{self.root} has no column 'action': name the right one, such as data.action_key={close[0]}."
            )

    def _joined(self, what: str) -> np.ndarray:
        """float32 [rows, D] of the columns that make up the action or the state, side by side."""
        parts = [self.rows.column(key) for key in self._keys[what]]
        texts = [key for key, part in zip(self._keys[what], parts) if part.dtype.kind == "O"]
        if texts:
            raise UserError(f"{self.root}: column '{texts[0]}' holds text or gaps, and cannot be the {what}.")
        parts = [part.reshape(len(part), -1).astype(np.float32, copy=False) for part in parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _task_texts(self) -> np.ndarray | None:
        """Object [rows], the text of each row where a language column gives it; None: by task number."""
        names = self.rows.schema.names
        if self._language is not None:
            column = self.rows.column(self._language)
            if column.dtype == object:
                return column
            numbers = column.reshape(-1)
        elif "task_index" in names:
            numbers = self.rows.column("task_index").reshape(-1)
        else:
            return None
        foreign = sorted(set(np.unique(numbers).tolist()) - set(self._tasks))
        if foreign:
            raise UserError(
                f"{self.root}: rows have task number {foreign[0]}, but meta/ lists the tasks "
                f"{', '.join(map(str, sorted(self._tasks)[:20])) or '(none)'}: {CHECK}."
            )
        return None

    def _probe(self, asked: str | None) -> Choice | None:
        parts = [part for entry in self.entries[:1] for part in entry.videos.values()]
        return choose_backend(asked, str(self.root / parts[0].path)) if parts else None

    def _describe(self, info: Mapping) -> DatasetInfo:
        def dimensions(what: str) -> tuple[int, tuple[str, ...]]:
            names = sum((dimension_names(self.features.columns.get(key)) for key in self._keys[what]), ())
            size = self._values[what].shape[1] if what in self._values else 0
            return size, names if len(names) == size else ()

        state_dim, state_names = dimensions(STATE)
        action_dim, action_names = dimensions(ACTION)
        return DatasetInfo(
            path=self.root,
            format="lerobot_datasets",
            version=self.layout.version,
            fps=float(info["fps"]),
            cameras=self.features.cameras,
            state_dim=state_dim,
            action_dim=action_dim,
            state_names=state_names,
            action_names=action_names,
            robot_type=info.get("robot_type"),
        )

    # ------------------------------------------------------------------------------------------------ reading

    def get(self, position: int, needs: DataNeeds) -> Sample:
        return self.get_many([position], needs)[0]

    def get_many(self, positions: Sequence[int], needs: DataNeeds) -> list[Sample]:
        places = [self._place(position) for position in positions]
        samples = [self._row(*place, needs) for place in places]
        for name in self.features.cameras if needs.cameras is None else needs.cameras:
            if name not in self.features.cameras:
                raise unknown("camera", name, self.features.cameras)
            self._add_camera(name, samples, places, needs.image_offsets)
        return samples

    def _place(self, position: int) -> tuple[int, int]:
        """(number of the entry, frame within it)."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside 0..{len(self) - 1}")
        number = int(np.searchsorted(self._offsets, position, side="right")) - 1
        return number, position - self.rows.offsets[number]

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.asarray(self.rows.offsets)

    def _row(self, number: int, frame: int, needs: DataNeeds) -> Sample:
        entry, first = self.entries[number], self.rows.offsets[number]
        row = first + frame
        sample: Sample = {"episode_index": entry.index, "frame_index": frame, "dataset_index": 0}
        sample["index"] = entry.start + frame
        sample["timestamp"] = float(self._cell("timestamp", row, frame / self.info.fps))
        sample["task_index"] = int(self._cell("task_index", row, 0))
        sample[TASK] = self._text(entry, row, sample["task_index"])
        if ACTION in self._values:
            steps, pad = window(frame, needs.action_offsets, entry.length)
            sample[ACTION], sample[ACTION_IS_PAD] = self._values[ACTION][first + steps], pad
        if STATE in self._values:
            steps, pad = window(frame, needs.state_offsets, entry.length)
            states = self._values[STATE][first + steps]
            sample[STATE] = states[0] if len(steps) == 1 else states
            if len(steps) > 1:
                sample[f"{STATE}_is_pad"] = pad
        return sample

    def _cell(self, key: str, row: int, otherwise: float) -> float:
        return self.rows.column(key)[row].item() if key in self.rows.schema.names else otherwise

    def _text(self, entry: Entry, row: int, task: int) -> str:
        if self._texts is not None:
            return str(self._texts[row])
        if self._language is not None:
            return self._tasks[int(self.rows.column(self._language)[row].item())]
        return self._tasks.get(task) or (entry.tasks[0] if entry.tasks else "")

    def tasks(self) -> list[str]:
        """Of the rows, not as the episodes' metadata has it: a row may have any of its dataset's tasks."""
        if self._texts is not None:
            return sorted(map(str, set(self._texts.tolist())))
        key = self._language or "task_index"
        if key not in self.rows.schema.names:
            return super().tasks()
        texts = [self._tasks[number] for number in np.unique(self.rows.column(key)).tolist()]
        return texts if all(texts) else [*filter(None, texts), *super().tasks()]

    def _add_camera(
        self, name: str, samples: list[Sample], places: list[tuple[int, int]], offsets: Sequence[int]
    ) -> None:
        key, several = self.features.camera_keys[name], len(offsets) > 1
        windows = [window(frame, offsets, self.entries[number].length) for number, frame in places]
        if self.features.cameras[name].kind == "video":
            pictures = self._video_frames(key, places, [steps for steps, _ in windows])
        else:
            pictures = [self._stored_frames(key, number, steps) for (number, _), (steps, _) in zip(places, windows)]
        for sample, frames, (_, pad) in zip(samples, pictures, windows):
            sample[IMAGES + name] = frames if several else frames[0]
            if several:
                sample[f"{IMAGES}{name}_is_pad"] = pad

    def _video_frames(self, key: str, places: list[tuple[int, int]], steps: list[np.ndarray]) -> list[np.ndarray]:
        """uint8 [T, H, W, 3] for each place; all frames of one file are decoded in one pass."""
        by_file: dict[str, list[int]] = {}
        for slot, (number, _) in enumerate(places):
            by_file.setdefault(self.entries[number].videos[key].path, []).append(slot)
        out: list[np.ndarray] = [np.empty(0)] * len(places)
        for path, slots in by_file.items():
            parts = [self.entries[places[slot][0]].videos[key] for slot in slots]
            rows = np.concatenate([part.start + steps[slot] for part, slot in zip(parts, slots)])
            frames = self._pool.frames(str(self.root / path), rows.tolist(), parts[0].file)
            for slot, of_slot in zip(slots, np.split(frames, len(slots))):
                out[slot] = of_slot
        return out

    def _stored_frames(self, key: str, number: int, steps: np.ndarray) -> np.ndarray:
        entry, place = self.entries[number], self.rows.places[number]
        rows = place.start + steps if isinstance(place, slice) else place[steps]
        return np.stack([self._pictures.picture(entry.data, row, key) for row in rows.tolist()])

    # ------------------------------------------------------------------------------------------------ the
    # rest

    def column(self, key: str, episode: Episode) -> np.ndarray:
        number = self._number[episode.index]
        span = slice(self.rows.offsets[number], self.rows.offsets[number + 1])
        return self._values[key][span] if key in self._values else self.rows.column(key)[span]

    @cached_property
    def _number(self) -> dict[int, int]:
        return {entry.index: number for number, entry in enumerate(self.entries)}

    def stored_statistics(self) -> Mapping[str, Mapping[str, np.ndarray]] | None:
        """As stored (v2.1: merged over the episodes, without quantiles); cameras by channel, [C].

        Action and state are under their canonical names whatever the columns are called.
        """
        stored = self.layout.statistics() or merge_episodes(self.layout.episode_statistics())
        if not stored:
            return None
        chosen = {what: [stored[key] for key in keys if key in stored] for what, keys in self._keys.items()}
        for what, keys in self._keys.items():
            if keys != (what,):
                stored.pop(what, None)  # of another column than the one that was chosen
        for what, keys in self._keys.items():
            if keys and len(chosen[what]) == len(keys):
                stored[what] = _side_by_side(chosen[what])
        layouts = {self.features.camera_keys[name]: layout for name, layout in self.features.layouts.items()}
        shaped: dict[str, dict[str, np.ndarray]] = {}
        for key, entry in stored.items():
            shaped[key] = per_channel(entry, layouts[key]) if key in layouts else entry
        return shaped

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for folder, folders, files in os.walk(self.root):
            folders.sort()
            for name in sorted(files):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(self.root)}:{path.stat().st_size};".encode())
        digest.update((self.root / "meta/info.json").read_bytes())
        digest.update(repr([(e.index, e.length, e.start) for e in self.entries]).encode())
        for what, values in self._values.items():
            digest.update(f"{what}{self._keys[what]}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values))
        return digest.hexdigest()


def _columns(key: str) -> tuple[str, ...]:
    """``"a,b"`` → the columns a and b, side by side."""
    return tuple(part.strip() for part in key.split(",") if part.strip())


def _side_by_side(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Statistics of joined columns: those that all of them have, count once."""
    names = set.intersection(*(set(part) for part in parts))
    joined = {name: np.concatenate([part[name].reshape(-1) for part in parts]) for name in names}
    return joined | ({"count": parts[0]["count"]} if "count" in names else {})
