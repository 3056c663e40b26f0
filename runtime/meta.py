"""``--init-on-meta``: a model larger than one device, built without memory; each rank reads its own rows.

Parameters are made on the meta device (buffers are real: they are small, and computed, not loaded). After wrapping,
every rank gets memory for its shards and fills them from the files, one tensor at a time; of a tensor that is stored
as the model has it, only the rank's own rows are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlaforge.data.errors import UserError
from vlaforge.graphs.rows import cut_tables
from vlaforge.models import Family
from vlaforge.models.convert import Account, detect
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.checkpoint.tensors import TensorFiles
from vlaforge.runtime.checkpoint.weights import open_weights, own_layout
from vlaforge.runtime.params import canonical, split_names
from vlaforge.runtime.wrap import strategy_of


def check(args: TrainingArgs, world: int, resuming: bool) -> None:
    """UserError where the flag cannot do what it says."""
    if strategy_of(args, world) not in ("zero1", "fsdp", "hsdp"):
        raise UserError(
            "--init-on-meta needs weights that are sharded over several ranks: --distributed-strategy fsdp, or ddp "
            "with --zero-optimizer, and more than one rank."
        )
    if args.use_lora:
        raise UserError("--init-on-meta does not go with --use-lora: adapters start from whole weights.")
    if not resuming and args.pretrained_checkpoint is None:
        raise UserError("--init-on-meta reads all weights from files: give --pretrained-checkpoint, or --resume.")


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have parameters without memory, and real buffers."""
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


def fill(
    model: nn.Module, family: Family, args: TrainingArgs, found: Path | None, device: torch.device
) -> Account:
    """Memory and values for the parameters of the wrapped `model`, which are on the meta device.

    Raises:
        UserError: weights are missing or do not fit (all faults named), on every rank alike.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    stored = formats.read(found, "model") if found is not None else open_weights(args.pretrained_checkpoint)
    new = () if found is not None else split_names(args.new_modules)
    if new:
        raise UserError("--init-on-meta reads all weights from files; --new-modules would leave some without values.")
    parameters = {canonical(name): value for name, value in (*model.named_parameters(), *_kept_buffers(model))}
    tables = {canonical(name): rows for name, rows in cut_tables(model).items()}
    layout = own_layout()
    if found is None and not set(parameters) & set(stored):
        layout = detect(family.part("convert").LAYOUTS, list(stored))
    shapes = {name: tables[name].shape(p) if name in tables else p.shape for name, p in parameters.items()}
    _, account = layout.load(formats.shapes(stored), shapes)
    with torch.no_grad():
        for official in stored:
            place = layout.place(official)
            if place is None or place[0] not in parameters or place[0] not in account.loaded:
                continue
            target, rule = parameters[place[0]], place[1]
            if place[0] in tables:
                table = rule.to_ours(stored[official], shapes[place[0]])
                part = _cut(tables[place[0]].part(place[0], table, "masters"), target)
            elif rule.load is None and not rule.reshape:
                part = _rows(stored, official, target)
            else:
                part = _cut(rule.to_ours(stored[official], target.shape), target)
            _into(target, part)
        for name, official in account.tied.items():
            _into(parameters[name], _rows(stored, official, parameters[name]))
    return account


def _kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that checkpoints hold."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _window(target: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """(sizes, offsets) of this rank's part of `target`."""
    if not isinstance(target, DTensor):
        return tuple(target.shape), (0,) * target.ndim
    return compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)


def _rows(stored: Mapping[str, Tensor], name: str, target: Tensor) -> Tensor:
    """This rank's part of a stored tensor; from files only these rows are read."""
    sizes, offsets = _window(target)
    if isinstance(stored, TensorFiles) and len(sizes) and tuple(sizes[1:]) == tuple(target.shape[1:]):
        return stored.rows(name, offsets[0], offsets[0] + sizes[0])
    return _cut(stored[name], target)


def _cut(value: Tensor, target: Tensor) -> Tensor:
    for axis, (size, offset) in enumerate(zip(*_window(target))):
        value = value.narrow(axis, min(offset, value.shape[axis]), size)
    return value


def _into(target: Tensor, value: Tensor) -> None:
    local = target.to_local() if isinstance(target, DTensor) else target
    local.copy_(value.reshape(local.shape))
