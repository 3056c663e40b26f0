"""Formats of a checkpoint's tensors: the groups ``model``, ``ema`` and ``optim``, each a mapping by name.

With LoRA, ``adapter_model.safetensors`` stands in the model's place in every format.

========== =============================== ============================ =================================
format     model                           ema                          optim
========== =============================== ============================ =================================
safetensors ``model*.safetensors``         ``ema*.safetensors``         ``training_state*.safetensors``
pt          ``pytorch_model.pt``           ``ema.pt``                   ``training_state*.safetensors``
dcp         ``dcp/`` with keys ``model.x``, ``ema.x``, ``optim.x``; the leading rank writes whole tensors
========== =============================== ============================ =================================

A ``.pt`` holds nothing but a dict of tensors and is read with ``weights_only=True``. DCP keeps its table of
contents as a pickle; it is read by an unpickler that makes nothing but DCP's own records.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException

from vlaforge.data.errors import UserError
from vlaforge.runtime.checkpoint import tensors as files
from vlaforge.runtime.checkpoint.files import Draft

FORMATS = ("safetensors", "pt", "dcp")
Format = Literal["safetensors", "pt", "dcp"]
Groups = Mapping[str, Mapping[str, Tensor]]
STEMS = {"model": "model", "adapter": "adapter_model", "ema": "ema", "optim": "training_state"}
PT_NAMES = {"model": "pytorch_model.pt", "ema": "ema.pt"}
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
DCP = "dcp"

# one process writing or reading alone is meant
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def write(draft: Draft, format: Format, groups: Groups, shard_bytes: int = files.SHARD_BYTES) -> None:
    """Writes all groups into the draft."""
    if "adapter" in groups:  # peft reads nothing but safetensors
        files.save(draft, STEMS["adapter"], groups["adapter"], shard_bytes=1 << 62)
        groups = {name: tensors for name, tensors in groups.items() if name != "adapter"}
    if format == "dcp":
        if groups:
            _write_dcp(draft, groups)
        return
    for group, tensors in groups.items():
        if format == "pt" and group in PT_NAMES:
            with draft.file(PT_NAMES[group]) as sink:
                torch.save({name: files.whole(tensor) for name, tensor in tensors.items()}, sink)
        else:
            files.save(draft, STEMS[group], tensors, shard_bytes)


def format_of(folder: Path) -> Format:
    """Which format a folder is in. UserError when it holds no weights."""
    if (folder / DCP).is_dir():
        return "dcp"
    if (folder / PT_NAMES["model"]).is_file():
        return "pt"
    if any((folder / name).is_file() for name in SAFETENSORS):
        return "safetensors"
    raise UserError(
        f"'{folder}' holds no weights: expected model.safetensors (or its index), pytorch_model.pt or dcp/."
    )


def read(folder: Path, group: str) -> Mapping[str, Tensor] | None:
    """One group's tensors by name on the host, or None when the checkpoint has none."""
    format = "safetensors" if group == "adapter" else format_of(folder)
    if format == "dcp":
        found = DcpGroup(folder / DCP, group)
        return found if found else None
    if format == "pt" and group in PT_NAMES:
        path = folder / PT_NAMES[group]
        return load_pt(path) if path.is_file() else None
    stem = STEMS[group]
    if not any((folder / f"{stem}.safetensors{end}").is_file() for end in ("", ".index.json")):
        return None
    return files.TensorFiles(folder, stem)


def shapes(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `read` gives as tensors on the meta device; of files that say their shapes no value is read."""
    told = isinstance(stored, files.TensorFiles | DcpGroup)
    sizes = {name: stored.shape(name) if told else stored[name].shape for name in stored}
    return {name: torch.empty(size, device="meta") for name, size in sizes.items()}


def load_pt(path: Path) -> dict[str, Tensor]:
    """A ``.pt`` file's dict of tensors, without running anything in it. UserError otherwise."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"'{path}' is damaged or holds more than tensors: {reason}") from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    tensors = dict(_leaves(content, "")) if isinstance(content, dict) else {}
    if not tensors:
        raise UserError(f"'{path}' holds no dict of tensors.")
    return tensors


def _leaves(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dicts by dotted name; numbers and texts beside them (a step, a dtype) are no
    weights."""
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")


# ------------------------------------------------------------------------------------------- dcp


def _write_dcp(draft: Draft, groups: Groups) -> None:
    flat = {f"{group}.{name}": value for group, tensors in groups.items() for name, value in tensors.items()}
    writer = dcp.FileSystemWriter(draft.path / DCP, sync_files=True)
    dcp.save(flat, storage_writer=writer, no_dist=True)
    draft.adopt(DCP)


class _OnlyMetadata(pickle.Unpickler):
    """Makes DCP's records, torch's plain value types and nothing else."""

    ALLOWED = {
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
    }
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        if module in self.MODULES or (module, name) in self.ALLOWED or _is_dtype(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


class SafeReader(dcp.FileSystemReader):
    """DCP's reader of a folder, with the table of contents read safely."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as raw:
                found = _OnlyMetadata(raw).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"'{path}' cannot be read safely: {error}.") from error
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = dcp_metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class DcpGroup(Mapping[str, Tensor]):
    """One group of a DCP folder by name, whole, on the host; read in one pass when the first tensor is asked for.

    Raises:
        UserError: a file is missing, shorter than the table of contents says, or damaged.
    """

    def __init__(self, folder: Path, group: str):
        self.folder, self.prefix = folder, f"{group}."
        contents = SafeReader(folder).read_metadata()
        self._entries = {
            name.removeprefix(self.prefix): entry
            for name, entry in contents.state_dict_metadata.items()
            if name.startswith(self.prefix)
        }
        self._read: dict[str, Tensor] = {}
        ends: dict[str, int] = {}
        for part in contents.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        for name, end in sorted(ends.items()):
            size = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size is None or size < end:
                found = "is missing" if size is None else f"has {size} bytes instead of {end}"
                raise UserError(f"Checkpoint '{folder}' is broken: {name} {found}.")

    def __getitem__(self, name: str) -> Tensor:
        if not self._read:
            names = {f"{self.prefix}{name}": self._entries[name] for name in self._entries}
            state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in names.items()}
            try:
                dcp.load(state, storage_reader=SafeReader(self.folder), no_dist=True)
            except CheckpointException as error:
                why = type(next(iter(error.failures.values()))[0]).__name__  # its text speaks to programmers
                held = self.prefix.rstrip(".")
                raise UserError(
                    f"Checkpoint '{self.folder}' is broken: the tensors of '{held}' in it are damaged ({why})."
                ) from error
            self._read = {name.removeprefix(self.prefix): value for name, value in state.items()}
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return tuple(self._entries[name].size)
