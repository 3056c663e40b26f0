"""Folders that are whole or absent: written aside, synced, listed in a manifest with hashes, then renamed.

    <parent>/.writing-steps_40/ ...   every file hashed as it is written, and synced
    manifest.json                     last file: {"files": {path: {"size", "sha256"}}, ...}
    <parent>/steps_40/                one rename; a reader sees the whole folder or none

A process that dies at any moment leaves the earlier folders as they were, and at most one ``.writing-*`` that
the next run removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"
WRITING, TRASH = ".writing-", ".removing-"
FORMAT = 1
CHUNK = 1 << 24


class Sink:
    """A file being written: counts and hashes what passes through. `write` takes any buffer."""

    def __init__(self, file: BinaryIO):
        self.file, self.size, self._hash = file, 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self.file.write(part)
            self._hash.update(part)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        self.file.flush()

    def entry(self) -> dict[str, Any]:
        return {"size": self.size, "sha256": self._hash.hexdigest()}


class Draft:
    """A folder `parent/name` being written; nothing of it is visible under that name before `commit`."""

    def __init__(self, parent: Path, name: str):
        self.parent, self.final = parent, parent / name
        self.path = parent / f"{WRITING}{name}"
        self.files: dict[str, dict[str, Any]] = {}
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    @contextmanager
    def file(self, name: str) -> Iterator[Sink]:
        """A binary file of the folder (``dcp/x`` makes the subfolder), synced to the disk on leaving."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as raw:
            sink = Sink(raw)
            yield sink
            raw.flush()
            os.fsync(raw.fileno())
        self.files[name] = sink.entry()

    def text(self, name: str, content: str) -> None:
        with self.file(name) as sink:
            sink.write(content.encode())

    def json(self, name: str, content: Any) -> None:
        self.text(name, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def copy(self, source: Path, name: str) -> None:
        with self.file(name) as sink, open(source, "rb") as raw:
            while block := raw.read(CHUNK):
                sink.write(block)

    def adopt(self, folder: str) -> None:
        """Lists, hashes and syncs files that something else wrote into `folder` of the draft."""
        for path in sorted((self.path / folder).rglob("*")):
            if path.is_file():
                self.files[str(path.relative_to(self.path))] = digest(path)
                _sync(path)

    def commit(self, about: Mapping[str, Any]) -> Path:
        """Writes the manifest (`about` beside the list of files) and gives the folder its name."""
        listed = dict(sorted(self.files.items()))
        self.json(MANIFEST, {"format": FORMAT, **about, "files": listed})
        for folder in sorted({path.parent for path in self.path.rglob("*")} | {self.path}):
            _sync(folder)
        earlier = _aside(self.final) if self.final.exists() else None
        os.rename(self.path, self.final)
        _sync(self.parent)
        if earlier is not None:
            shutil.rmtree(earlier, ignore_errors=True)
        return self.final

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def digest(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    size, value = 0, hashlib.sha256()
    with open(path, "rb") as raw:
        while block := raw.read(CHUNK):
            size += len(block)
            value.update(block)
    return {"size": size, "sha256": value.hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def manifest(folder: Path) -> dict[str, Any]:
    """What `folder`'s manifest says. OSError or ValueError when it has none that can be read."""
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise ValueError("it is no manifest")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is {content.get('format')}, this version reads {FORMAT}")
    return content


def fault(folder: Path, hashes: bool = True) -> str | None:
    """What is wrong with a folder, in words, or None when it is whole: every listed file there, with its size
    and (`hashes`) its content."""
    try:
        listed = manifest(folder)["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read ({error})"
    for name, entry in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
    for name, entry in listed.items() if hashes else ():
        if digest(folder / name)["sha256"] != entry["sha256"]:
            return f"the content of {name} is not what was written"
    return None


def _aside(folder: Path) -> Path:
    aside = folder.parent / f"{TRASH}{folder.name}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def remove(folder: Path) -> None:
    """Deletes a folder; a process that dies half-way leaves no folder that looks whole."""
    shutil.rmtree(_aside(folder), ignore_errors=True)


def sweep(parent: Path) -> list[str]:
    """Removes what dead processes left half-written or half-deleted; returns the names.

    A folder that was put aside to be replaced, and whose replacement never came, gets its name back.
    """
    for path in parent.glob(f"{TRASH}*"):
        final = parent / path.name.removeprefix(TRASH)
        if not final.exists() and fault(path, hashes=False) is None:
            os.rename(path, final)
    left = [path for path in parent.glob(".*") if path.name.startswith((WRITING, TRASH)) and path.is_dir()]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]
