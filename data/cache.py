"""Features computed ahead of training (video latents, encoded prompts): checked each time they are used.

    folder/manifest.json           what it is: its dataset, every setting that decides the content, file hashes
    folder/rows-00000.safetensors  ``row`` int64 [n] and, by field, [n, ...]: one entry a sample of the dataset
    folder/texts.safetensors       by field [P, L, D], and ``mask`` bool [P, L]: one entry a distinct prompt

`cache_writer` makes it, with the manifest last, so a folder without one is unfinished. A cache that was made from
another dataset, with other settings or with other weights is an error that names the difference: stale features train
a model silently wrong.

Axes: P prompts, L tokens, D width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlaforge.data.dataset import Dataset, Episode
from vlaforge.data.errors import UserError
from vlaforge.data.schema import ACTION, STATE

FORMAT = 1
MANIFEST = "manifest.json"
TEXTS = "texts.safetensors"
ROW = "row"
MASK = "mask"


@dataclass(frozen=True)
class CacheSpec:
    """What a family caches, and what decides it.

    Args:
        rows: field stored for each sample → batch fields it is encoded from (none: it is stored as it is).
        texts: field stored for each distinct prompt → batch fields it is encoded from.
        identity: field → JSON tree of everything that decides its values. A None in it is unknown here (weights that
            are not on this machine) and equals anything.
        dtype: ``float32`` or ``bfloat16``, of stored floats.
    """

    rows: Mapping[str, tuple[str, ...]]
    texts: Mapping[str, tuple[str, ...]]
    identity: Mapping[str, Any]
    dtype: str = "float32"


def sampled_hash(path: Path, piece: int = 1 << 20) -> str:
    """SHA-256 of a file's size and of its first, middle and last MiB: quick at any size, and different for other
    weights.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in sorted({0, size // 2, max(0, size - piece)}):
            file.seek(start)
            digest.update(file.read(piece))
    return digest.hexdigest()


def dataset_identity(dataset: Dataset) -> dict[str, Any]:
    """What ties a cache to its dataset: the files' names and sizes, and each episode's rows."""
    episodes = {str(episode.index): episode_digest(dataset, episode) for episode in dataset.episodes}
    return {"files": files_digest(dataset.info.path), "episodes": episodes}


def files_digest(path: Path) -> str:
    """Hash of the names and sizes of all files under `path`."""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size if file.exists() else 0
        digest.update(f"{file.relative_to(path)}:{size};".encode())
    return digest.hexdigest()


def episode_digest(dataset: Dataset, episode: Episode) -> str:
    """Hash of an episode's place, tasks, actions and states."""
    digest = hashlib.blake2b(f"{episode.start}/{episode.length}/{episode.tasks}".encode(), digest_size=8)
    for key, dim in ((ACTION, dataset.info.action_dim), (STATE, dataset.info.state_dim)):
        if dim:
            digest.update(np.ascontiguousarray(dataset.column(key, episode)))
    return digest.hexdigest()


def difference(stored: Any, wanted: Any, path: str = "") -> str | None:
    """Where two JSON trees differ, as text; None when they agree. None on either side agrees with anything."""
    if stored is None or wanted is None:
        return None
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in sorted(stored.keys() | wanted.keys()):
            if key not in stored or key not in wanted:
                return f"{path}.{key} is in only one of them".removeprefix(".")
            if found := difference(stored[key], wanted[key], f"{path}.{key}"):
                return found
        return None
    if stored != wanted:
        return f"{path.removeprefix('.')} is {stored} in the cache and {wanted} here"
    return None


class FeatureCache:
    """A finished cache, opened for reading; picklable, files are opened in the process that reads.

    Args:
        folder: of the cache.
        spec: of this run; compared with the manifest for the fields in use.
        fields: which fields this run reads.

    Raises:
        UserError: there is no finished cache, a file is missing or changed, or something differs from `spec`.
    """

    def __init__(self, folder: Path | str, spec: CacheSpec, fields: Iterable[str]):
        self.folder, self.spec, self.fields = Path(folder).expanduser(), spec, tuple(fields)
        self.manifest = _read_manifest(self.folder)
        for name in self.fields:
            if name not in self.manifest["identity"]:
                raise UserError(
                    f"Cache '{self.folder}' holds no '{name}' (it holds {sorted(self.manifest['identity'])})."
                )
            wanted = json.loads(json.dumps(spec.identity[name]))  # tuples become lists, as in the manifest
            if found := difference(self.manifest["identity"][name], wanted):
                raise UserError(
                    f"Cache '{self.folder}' was made with other settings for '{name}': {found}. Make it again with "
                    f"`forge-data precompute`, or set what it was made with."
                )
        self._check_files()
        self._shards = [entry["name"] for entry in self.manifest["files"] if entry["name"].startswith("rows-")]
        self._index()
        self._prompts = {prompt: number for number, prompt in enumerate(self.manifest["prompts"])}
        self._handles: dict[tuple[int, str], Any] = {}

    def _check_files(self) -> None:
        for entry in self.manifest["files"]:
            path = self.folder / entry["name"]
            if not path.is_file():
                raise UserError(
                    f"Cache '{self.folder}' lacks its file {entry['name']}: copy it again, or make it again."
                )
            if sampled_hash(path) != entry["sample_sha256"]:
                raise UserError(
                    f"'{path}' is not the file that the cache's manifest describes: it is damaged or was changed."
                )

    def _index(self) -> None:
        """Where each row lies: sorted row ids with their shard and place."""
        found = [self._open(name).get_tensor(ROW).numpy() for name in self._shards]
        rows = np.concatenate(found) if found else np.zeros(0, np.int64)
        shard = np.repeat(np.arange(len(found)), [len(part) for part in found])
        place = np.concatenate([np.arange(len(part)) for part in found]) if found else rows
        order = np.argsort(rows, kind="stable")
        self._rows, self._shard, self._place = rows[order], shard[order], place[order]

    def bind(self, dataset: Dataset) -> None:
        """UserError unless the cache was made from `dataset` and holds every episode that it visits."""
        stored, source = self.manifest["dataset"], f"Cache '{self.folder}' was made from '{self.manifest['path']}'"
        if stored["files"] != files_digest(dataset.info.path):
            raise UserError(f"{source}, whose files are not those of '{dataset.info.path}': make the cache again.")
        for episode in dataset.episodes:
            if stored["episodes"].get(str(episode.index)) != episode_digest(dataset, episode):
                what = "holds other rows now" if str(episode.index) in stored["episodes"] else "is not in it"
                raise UserError(f"{source}; episode {episode.index} {what}: make the cache again, for all episodes.")

    def row(self, name: str, row: int) -> np.ndarray:
        """The stored field of the sample with this row id, float32 (or bool). KeyError when it is not there."""
        at = int(np.searchsorted(self._rows, row))
        if at == len(self._rows) or self._rows[at] != row:
            raise KeyError(f"cache '{self.folder}' has no row {row}")
        place = int(self._place[at])
        return _numpy(self._open(self._shards[self._shard[at]]).get_slice(name)[place : place + 1])[0]

    def text(self, name: str, prompt: str) -> tuple[np.ndarray, np.ndarray]:
        """(field float32 [L, D], mask bool [L]) of a prompt. UserError when the cache does not hold it."""
        if prompt not in self._prompts:
            raise UserError(
                f"Cache '{self.folder}' has no text {prompt!r} (it has {len(self._prompts)} others): make it again."
            )
        at, file = self._prompts[prompt], self._open(TEXTS)
        return tuple(_numpy(file.get_slice(part)[at : at + 1])[0] for part in (name, MASK))

    def _open(self, name: str) -> Any:
        handles, key = self.__dict__.setdefault("_handles", {}), (os.getpid(), name)
        if key not in handles:
            try:
                handles[key] = safe_open(self.folder / name, "pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"'{self.folder / name}' cannot be read: {error}") from error
        return handles[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}


def open_caches(text: str, spec: CacheSpec, fields: Iterable[str]) -> list[FeatureCache]:
    """The caches of `data.cache`: one folder, or for a mixture one a dataset, separated by commas."""
    return [FeatureCache(part.strip(), spec, fields) for part in text.split(",") if part.strip()]


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        what = "is not finished: run `forge-data precompute` again" if folder.is_dir() else "does not exist"
        raise UserError(f"Cache '{folder}' {what}.")
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise UserError(f"Cache '{folder}' has format {manifest['format']}; this version reads {FORMAT}.")
        return manifest
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is damaged ({error!r}): make the cache again.") from error


def verify(folder: Path | str) -> int:
    """Compares every byte with the manifest's hashes; returns the number of files. UserError at a difference."""
    folder = Path(folder)
    files = _read_manifest(folder)["files"]
    for entry in files:
        with (folder / entry["name"]).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise UserError(f"'{folder / entry['name']}' is not the file that the cache's manifest describes.")
    return len(files)


def _numpy(value: Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
