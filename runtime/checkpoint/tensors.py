"""Tensors in safetensors files, sharded above a size, written tensor by tensor without a second copy in
memory.

One file ``<stem>.safetensors``, or ``<stem>-00001-of-0000N.safetensors`` with
``<stem>.safetensors.index.json``, as the Hugging Face libraries read them. Tensors that share their memory
are stored once, with the other names in the metadata (``tied``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.runtime.checkpoint.files import Draft

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SHARD_BYTES = 5_000_000_000


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on the host, contiguous; a DTensor is gathered (by all ranks together)."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().contiguous()


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is, byte for byte in memory, that of an earlier name → the earlier name."""
    first: dict[tuple, str] = {}
    found = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or hasattr(tensor, "full_tensor") or tensor.is_meta:
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        kept = first.setdefault(key, name)
        if kept != name:
            found[name] = kept
    return found


def save(draft: Draft, stem: str, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `tensors` into the draft; `stem` is the file's name without its ending."""
    tied = ties(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    metadata = {"format": "pt", **({"tied": json.dumps(tied)} if tied else {})}
    shards = list(_shards(kept, shard_bytes))
    if len(shards) == 1:
        _write(draft, f"{stem}.safetensors", shards[0], metadata)
        return
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(draft, file, shard, metadata)
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    draft.json(f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        bytes = tensor.numel() * tensor.element_size()
        if shard and size + bytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += bytes
    yield shard


def _write(draft: Draft, file: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One file: length of the header (u64), the header (JSON, padded to 8 bytes), the tensors' bytes."""
    # largest elements first, so that every tensor starts at a multiple of its element size
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with draft.file(file) as sink:
        sink.write(len(text).to_bytes(8, "little"))
        sink.write(text)
        for name in names:
            value = whole(tensors[name])
            if value.numel():
                sink.write(value.reshape(-1).view(torch.uint8).numpy())


class TensorFiles(Mapping[str, Tensor]):
    """Tensors by name, each read from the disk when it is asked for; tied names (`tied`: name → stored name) give the
    tensor of their partner.

    Args:
        path: a ``.safetensors`` file, an index, or a folder that holds ``<stem>.safetensors`` or its index.
        stem: of the files in a folder.

    Raises:
        UserError: there is no such file, it is damaged, or a shard of the index is missing.
    """

    def __init__(self, path: Path | str, stem: str = "model"):
        self.files = _files_of(Path(path), stem)
        self.where: dict[str, Path] = {}
        self.tied: dict[str, str] = {}
        self._open: dict[Path, object] = {}
        for file in self.files:
            handle = self._handle(file)
            self.where |= dict.fromkeys(handle.keys(), file)
            self.tied |= json.loads((handle.metadata() or {}).get("tied", "{}"))

    def _handle(self, file: Path):
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except Exception as error:
                raise UserError(f"'{file}' is no whole safetensors file: {error}.") from error
        return self._open[file]

    def __getitem__(self, name: str) -> Tensor:
        name = self.tied.get(name, name)
        return self._handle(self.where[name]).get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.where, *self.tied])

    def __len__(self) -> int:
        return len(self.where) + len(self.tied)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along the first axis, read alone."""
        name = self.tied.get(name, name)
        return self._handle(self.where[name]).get_slice(name)[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        name = self.tied.get(name, name)
        return tuple(self._handle(self.where[name]).get_slice(name).get_shape())


def _files_of(path: Path, stem: str) -> list[Path]:
    if path.is_dir():
        single, index = path / f"{stem}.safetensors", path / f"{stem}.safetensors.index.json"
        path = index if index.is_file() else single
    if not path.is_file():
        raise UserError(f"There is no file '{path}'.")
    if path.suffix != ".json":
        return [path]
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{path}' is no index of safetensors files ({error!r}).") from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise UserError(f"'{path}' names {', '.join(missing)}, which is not beside it.")
    return [path.parent / name for name in names]
