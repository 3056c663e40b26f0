"""Writes a feature cache (see `cache`) shard by shard, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from vlaforge.data.cache import FORMAT, MANIFEST, MASK, ROW, TEXTS, CacheSpec, dataset_identity, sampled_hash
from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError

PROGRESS = "progress.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CacheWriter:
    """Writes a cache; run again after an interruption, it continues where whole shards end.

    Args:
        folder: new, or of an unfinished cache of the same content. Never inside the dataset.
        spec, fields: what is stored.
        dataset: whose rows they are.
        shard_rows: samples of one file.
        made_with: versions and device, for the record.
    """

    def __init__(
        self,
        folder: Path | str,
        spec: CacheSpec,
        fields: Iterable[str],
        dataset: Dataset,
        shard_rows: int = 512,
        made_with: Mapping[str, str] | None = None,
    ):
        self.folder, self.spec, self.fields = Path(folder).expanduser().resolve(), spec, tuple(fields)
        self.shard_rows = shard_rows
        data = Path(dataset.info.path).expanduser().resolve()
        if self.folder == data or data in self.folder.parents:
            raise UserError(f"The cache '{self.folder}' would lie inside the dataset: give a folder outside '{data}'.")
        self.header = {
            "format": FORMAT,
            "path": str(dataset.info.path),
            "dataset": dataset_identity(dataset),
            "identity": {name: spec.identity[name] for name in self.fields},
        }
        self.made_with = dict(made_with or {})
        self._files, self.prompts = self._resume()
        self._waiting: list[tuple[np.ndarray, dict[str, Tensor]]] = []

    def _resume(self) -> tuple[list[dict], list[str]]:
        """Files that an interrupted run of the same content has finished."""
        if (self.folder / MANIFEST).exists():
            raise UserError(f"'{self.folder}' already holds a cache: remove it, or give another folder.")
        progress = self.folder / PROGRESS
        if not progress.exists():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise UserError(f"'{self.folder}' is not empty and holds no cache: give another folder.")
            self.folder.mkdir(parents=True, exist_ok=True)
            return [], []
        stored = json.loads(progress.read_text())
        if stored["header"] != json.loads(json.dumps(self.header)):
            raise UserError(
                f"'{self.folder}' holds an unfinished cache of other content: remove it, or give another folder."
            )
        whole = [entry for entry in stored["files"] if (self.folder / entry["name"]).is_file()]
        return whole, stored["prompts"]

    def done(self) -> np.ndarray:
        """Row ids that are stored already, int64, sorted."""
        parts = [np.zeros(0, np.int64)]
        for entry in self._files:
            if entry["name"].startswith("rows-"):
                with safe_open(self.folder / entry["name"], "pt") as file:
                    parts.append(file.get_tensor(ROW).numpy())
        return np.sort(np.concatenate(parts))

    def add_rows(self, rows: Sequence[int], fields: Mapping[str, Tensor]) -> None:
        """Stores samples: their row ids and, by field, tensors [n, ...]."""
        self._waiting.append((np.asarray(rows, np.int64), {name: self._stored(fields[name]) for name in fields}))
        while sum(len(ids) for ids, _ in self._waiting) >= self.shard_rows:
            self._write_rows(self.shard_rows)

    def add_texts(self, prompts: Sequence[str], fields: Mapping[str, Tensor], mask_PL: Tensor) -> None:
        """Stores all distinct prompts at once: by field [P, L, D], and their mask."""
        stored = {name: self._stored(value) for name, value in fields.items()}
        self._save(TEXTS, {**stored, MASK: mask_PL.cpu().contiguous()})
        self.prompts = list(prompts)
        self._note()

    def finish(self) -> Path:
        """Writes what waits, then the manifest. Returns the folder."""
        self._write_rows(0)
        manifest = {**self.header, "made_with": self.made_with, "prompts": self.prompts, "files": self._files}
        _write_text(self.folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        (self.folder / PROGRESS).unlink(missing_ok=True)
        return self.folder

    def _stored(self, value: Tensor) -> Tensor:
        value = value.detach().cpu()
        return (value.to(DTYPES[self.spec.dtype]) if value.is_floating_point() else value).contiguous()

    def _write_rows(self, count: int) -> None:
        """One shard of `count` samples out of those that wait (0: all of them)."""
        if not self._waiting:
            return
        ids = np.concatenate([ids for ids, _ in self._waiting])
        fields = {name: torch.cat([part[name] for _, part in self._waiting]) for name in self._waiting[0][1]}
        count = count or len(ids)
        number = sum(entry["name"].startswith("rows-") for entry in self._files)
        shard = {name: value[:count].contiguous() for name, value in fields.items()}
        self._save(f"rows-{number:05d}.safetensors", {ROW: torch.from_numpy(ids[:count].copy()), **shard})
        rest = ids[count:], {name: value[count:] for name, value in fields.items()}
        self._waiting = [rest] if len(rest[0]) else []
        self._note()

    def _save(self, name: str, tensors: dict[str, Tensor]) -> None:
        path = self.folder / name
        content = save(tensors)
        with path.with_suffix(".tmp").open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").replace(path)
        entry = {
            "name": name,
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(content).hexdigest(),
            "sample_sha256": sampled_hash(path),
        }
        self._files = [*(e for e in self._files if e["name"] != name), entry]

    def _note(self) -> None:
        progress = {"header": self.header, "files": self._files, "prompts": self.prompts}
        _write_text(self.folder / PROGRESS, json.dumps(progress))


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
