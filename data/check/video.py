"""Checks on the videos of a LeRobot dataset."""

from __future__ import annotations

from pathlib import Path

from vlaforge.data.check.findings import Report
from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.features import Features
from vlaforge.data.readers.lerobot.layouts import Entry, Layout
from vlaforge.data.video import Expected, FrameIndex, VideoPool, build_index, choose_backend

STRICT = "pyav"  # the one that tells a damaged picture from a whole one


def check_videos(
    report: Report,
    root: Path,
    layout: Layout,
    features: Features,
    entries: list[Entry],
    backend: str | None,
    frames: str,
) -> None:
    """Videos that are missing, shorter or longer than their episodes, overlap, have another size, or do not decode.

    Args:
        frames: of each episode, which frames are decoded: ``ends`` (first, middle, last), ``all`` or ``none``.
    """
    by_file: dict[str, list[tuple[Entry, str]]] = {}
    for entry in entries:
        for key, part in entry.videos.items():
            by_file.setdefault(part.path, []).append((entry, key))
    pool = None
    for name in sorted(by_file):
        members = sorted(by_file[name], key=lambda member: member[0].videos[member[1]].start)
        index = _index(report, root, name, members)
        if index is None:
            continue
        key = members[0][1]
        fits = _check_parts(report, name, members, index, float(layout.info["fps"]))
        if frames == "none":
            _check_size(report, name, features, key, (index.height, index.width))
            continue
        if pool is None:
            choice = choose_backend(backend or STRICT, str(root / name))
            pool = VideoPool(choice.backend, float(layout.info["fps"]), capacity=4)
            report.looked.append(choice.note)
        held = Expected(index.count, index.count)  # what is there is decoded, whatever it should be
        sizes = [
            _decode(report, root, name, entry, entry.videos[own].start, pool, held, frames)
            for entry, own in members
            if entry.index in fits
        ]
        for size in dict.fromkeys(size for size in sizes if size):
            _check_size(report, name, features, key, size)
    stored = {str(path.relative_to(root)) for path in (root / "videos").rglob("*.mp4")}
    for stray in sorted(stored - set(by_file)):
        report.add("files", "is not used by any episode", stray, warning=True)


def _index(report: Report, root: Path, name: str, members: list[tuple[Entry, str]]) -> FrameIndex | None:
    try:
        return build_index(str(root / name))
    except UserError as error:
        for entry, _ in members:
            report.add("video" if (root / name).is_file() else "files", str(error), name, entry.index)
        return None


def _check_parts(
    report: Report, name: str, members: list[tuple[Entry, str]], index: FrameIndex, fps: float
) -> set[int]:
    """Findings on where episodes lie in the file; returns the numbers of those that lie inside it."""
    fits, end = set(), 0
    for entry, key in members:
        start = entry.videos[key].start
        if start < end:
            message = f"starts at frame {start} of the video, inside the episode before it, which ends at {end - 1}"
            report.add("video", message, name, entry.index)
        end = start + entry.length
        if end > index.count:
            short = end - max(index.count, start)
            message = f"the video has {index.count} frames, {short} fewer than its {entry.length} rows need"
            report.add("video", message, name, entry.index)
        else:
            fits.add(entry.index)
    if index.count > end:
        message = f"the video has {index.count} frames, {index.count - end} more than its episodes have rows"
        report.add("video", message, name, members[-1][0].index, warning=True)
    rate = 1 / float(index.step * index.time_base) if index.step else None
    if rate is None:
        report.add("video", "its frames are not evenly spaced", name, warning=True)
    elif abs(rate / fps - 1) > 1e-3:
        report.add("video", f"it shows {rate:g} frames a second; info.json says {fps:g}", name, members[0][0].index)
    return fits


def _check_size(report: Report, name: str, features: Features, key: str, size: tuple[int, int]) -> None:
    camera = next((features.cameras[name] for name, own in features.camera_keys.items() if own == key), None)
    if camera and size != (camera.height, camera.width):
        message = f"frames are {size[0]} x {size[1]}; info.json says {camera.height} x {camera.width}"
        report.add("video", message, name)


def _decode(
    report: Report, root: Path, name: str, entry: Entry, start: int, pool: VideoPool, held: Expected, frames: str
) -> tuple[int, int] | None:
    """Findings on frames that do not decode; returns (height, width) of the episode's first frame."""
    last, size = start + entry.length - 1, None
    rows = range(start, last + 1) if frames == "all" else sorted({start, start + entry.length // 2, last})
    try:
        for row in rows:
            picture = pool.frames(str(root / name), [row], held)[0]
            size = size or picture.shape[:2]
    except UserError as error:
        report.add("video", str(error), name, entry.index)
    return size
