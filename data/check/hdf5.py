"""The check of an HDF5 dataset: each recording by itself, then all of them together."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from vlaforge.data.check.columns import check_constant, check_duplicates, check_values, digest
from vlaforge.data.check.findings import Report, brief
from vlaforge.data.errors import UserError
from vlaforge.data.readers.hdf5 import LAYOUTS, resolve_layout
from vlaforge.data.readers.hdf5.files import open_hdf5, picture
from vlaforge.data.readers.hdf5.recordings import Options, Recording
from vlaforge.data.schema import ACTION, STATE


def check_hdf5(report: Report, path: Path, layout: str | None, options: Options, frames: str) -> None:
    """Adds to `report` what is wrong with the recordings at `path`. UserError when they are of no known layout."""
    layout = resolve_layout(path, layout)
    module = LAYOUTS[layout]
    recordings: list[Recording] = []
    for file in module.files(path):
        try:
            recordings += module.collect(file, options).recordings
        except UserError as error:
            report.add("files", str(error), file)
    report.looked += [f"HDF5 {layout}", f"{len(recordings)} episodes"]
    whole = [
        episode
        for episode, recording in enumerate(recordings)
        if _check_recording(report, episode, recording, recordings[0])
    ]
    digests, files = {}, {episode: _where(recordings[episode]) for episode in whole}
    vectors: dict[str, dict[int, np.ndarray]] = {ACTION: {}, STATE: {}}
    sizes: dict[int, dict[str, tuple[int, ...]]] = {}
    for episode in whole:
        recording = recordings[episode]
        own = {ACTION: recording.action, STATE: recording.state}
        own = {key: values for key, values in own.items() if values is not None}
        digests[episode] = digest(own)
        for key, values in own.items():
            check_values(report, key, values, files[episode], episode)
            vectors[key][episode] = values
        sizes[episode] = _check_pictures(report, episode, recording, frames)
    _check_sizes(report, sizes, files)
    for key, held in vectors.items():
        widths = {values.shape[1] for values in held.values()}
        if len(widths) > 1:
            _report_widths(report, key, held, files)
        elif held:
            check_constant(report, key, list(held.values()), (), "", list(held))
    check_duplicates(report, digests, files)


def _where(recording: Recording) -> str:
    return f"{recording.file}:/{recording.group}" if recording.group else str(recording.file)


def _check_recording(report: Report, episode: int, recording: Recording, first: Recording) -> bool:
    """Findings on lengths, and on what only one of this and the first recording has; False where it cannot be looked at
    further."""
    where = _where(recording)
    if recording.length == 0:
        report.add("episodes", "holds no rows", where, episode)
        return False
    if not recording.task:
        report.add("tasks", "has no language instruction", where, episode, warning=True)
    if recording.state is not None and len(recording.state) != recording.length:
        message = f"has {recording.length} actions but {len(recording.state)} states"
        report.add("rows", message, where, episode)
    if (recording.state is None) != (first.state is None):
        report.add(
            "types", f"has {'no' if recording.state is None else 'a'} state, unlike {_where(first)}", where, episode
        )
    if set(recording.cameras) != set(first.cameras):
        own, other = (brief(sorted(each.cameras)) or "none" for each in (recording, first))
        report.add("types", f"has the cameras {own}, but {_where(first)} has {other}", where, episode)
    with open_hdf5(recording.file) as file:
        stated = file[recording.group or "/"].attrs.get("num_samples")
    if stated is not None and stated != recording.length:
        report.add("rows", f"num_samples is {stated}, but it has {recording.length} actions", where, episode)
    for camera, count in recording.frames.items():
        if count != recording.length:
            message = f"camera '{camera}' has {count} frames for {recording.length} rows"
            report.add("video", message, where, episode, warning=count > recording.length)
    return True


def _check_pictures(report: Report, episode: int, recording: Recording, frames: str) -> dict[str, tuple[int, ...]]:
    """Findings on pictures that cannot be decoded or change their size; returns each camera's size."""
    found: dict[str, tuple[int, ...]] = {}
    if frames == "none":
        return found
    with open_hdf5(recording.file) as file:
        holder = file[recording.group or "/"]
        for camera, name in recording.cameras.items():
            held = holder.get(name)
            if not isinstance(held, h5py.Dataset) or not len(held):
                continue
            count = min(len(held), recording.length)
            rows = range(count) if frames == "all" else sorted({0, count // 2, count - 1})
            try:
                sizes = {picture(held, row, f"camera '{camera}', row {row}").shape for row in rows}
            except UserError as error:
                report.add("video", str(error), _where(recording), episode)
                continue
            if len(sizes) > 1:
                message = f"camera '{camera}' has pictures of sizes {sorted(sizes)}"
                report.add("types", message, _where(recording), episode)
            found[camera] = next(iter(sizes))
    return found


def _check_sizes(report: Report, sizes: dict[int, dict[str, tuple[int, ...]]], files: dict[int, str]) -> None:
    """Each camera has pictures of one size in all recordings."""
    seen: dict[str, tuple[tuple[int, ...], int]] = {}
    for episode, own in sizes.items():
        for camera, size in own.items():
            like, other = seen.setdefault(camera, (size, episode))
            if size != like:
                message = f"camera '{camera}' is {size[0]} x {size[1]}, but {like[0]} x {like[1]} in episode {other}"
                report.add("types", message, files[episode], episode)


def _report_widths(report: Report, key: str, held: dict[int, np.ndarray], files: dict[int, str]) -> None:
    first = next(iter(held))
    for episode, values in held.items():
        if values.shape[1] != held[first].shape[1]:
            message = f"'{key}' has {values.shape[1]} dimensions; episode {first} has {held[first].shape[1]}"
            report.add("types", message, files[episode], episode)
