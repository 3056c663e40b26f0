"""Parameters that a pass put together, and how they come apart again.

A packed parameter is a concatenation of canonical ones along axis 0. `model.state_dict()` and `load_state_dict()` keep
speaking canonical names (hooks on the module that holds the packed one); whatever else is kept by parameter name (the
optimiser's moments, an average) goes through `split` and `join`. So do parameters that hold some rows of a canonical
one (`graphs.rows`).

    parts = packed_parts(model)              {"qkv.packed.weight": (Part("qkv.q_proj.weight", 0, 512), ...), ...}
    canonical = split(model, tensors)        by packed name -> by canonical name
    packed = join(model, canonical)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.graphs.rows import Outside, cut_tables

ATTRIBUTE = "_forge_parts"


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a packed parameter are the parameter called `name`."""

    name: str
    start: int
    stop: int


def pack_parameters(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter from several along axis 0; fp32 masters that `precision` left on them come along.

    ValueError when some train and others do not, or dtypes differ.
    """
    if len({(p.requires_grad, p.dtype) for p in parameters}) != 1:
        raise ValueError("only parameters that agree in dtype and in whether they train can be packed")
    packed = nn.Parameter(torch.cat([p.data for p in parameters]), requires_grad=parameters[0].requires_grad)
    masters = [getattr(p, "_master_fp32", None) for p in parameters]
    if all(master is not None for master in masters):
        packed._master_fp32 = torch.cat(masters)
    return packed


def last_rows(linear: nn.Linear, last: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the `last` outputs; 0: of all."""
    if not last:
        return linear.weight, linear.bias
    return linear.weight[-last:], None if linear.bias is None else linear.bias[-last:]


def install(holder: nn.Module, packed: str, members: Sequence[tuple[str, int]]) -> None:
    """Has `holder`'s state dict show the parameter `packed` (a path below `holder`) as its members.

    `members` are (path below `holder`, rows), in order. The parameter is at its place already.
    """
    if ATTRIBUTE not in holder.__dict__:
        holder.__dict__[ATTRIBUTE] = {}
        holder._register_state_dict_hook(_split_hook)
        holder.register_load_state_dict_pre_hook(_join_hook)
    start, parts = 0, []
    for name, rows in members:
        parts.append(Part(name, start, start + rows))
        start += rows
    holder.__dict__[ATTRIBUTE][packed] = tuple(parts)


def _split_hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for packed, parts in module.__dict__[ATTRIBUTE].items():
        if prefix + packed not in state:
            continue
        value = state.pop(prefix + packed)
        for part in parts:
            state[prefix + part.name] = value[part.start : part.stop]


def _join_hook(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for packed, parts in module.__dict__[ATTRIBUTE].items():
        names = [prefix + part.name for part in parts]
        if all(name in state for name in names):
            state[prefix + packed] = torch.cat([state.pop(name) for name in names])


def packed_parts(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    """Full name of each packed parameter of `model` → its parts, with full canonical names."""
    found = {}
    for prefix, module in model.named_modules():
        dot = prefix + "." if prefix else ""
        for packed, parts in module.__dict__.get(ATTRIBUTE, {}).items():
            found[dot + packed] = tuple(Part(dot + part.name, part.start, part.stop) for part in parts)
    return found


def split(model: nn.Module, tensors: Mapping[str, Tensor], outside: Outside = "zeros") -> dict[str, Tensor]:
    """Tensors by parameter name, packed ones taken apart; a 0-dim value (a step count) goes to every part.

    Rows of a table that are no parameter here are filled with what `outside` says.
    """
    parts, tables = packed_parts(model), cut_tables(model)
    canonical: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name in tables and value.ndim:
            value = tables[name].whole(value, outside)
        if name not in parts:
            canonical[name] = value
            continue
        for part in parts[name]:
            canonical[part.name] = value if value.ndim == 0 else value[part.start : part.stop]
    return canonical


def join(model: nn.Module, tensors: Mapping[str, Tensor], outside: Outside = "zeros") -> dict[str, Tensor]:
    """The inverse of `split`. A packed parameter whose parts are all absent stays absent.

    KeyError when only some of its parts are there; ValueError when their 0-dim values differ (they were stepped apart,
    and one packed parameter cannot hold that), or when rows that are no parameter here hold something else than
    `outside` says.
    """
    packed = dict(tensors)
    for name, rows in cut_tables(model).items():
        if name in packed and packed[name].ndim:
            packed[name] = rows.part(name, packed[name], outside)
    for name, parts in packed_parts(model).items():
        present = [part.name in packed for part in parts]
        if not any(present):
            continue
        if not all(present):
            missing = [part.name for part, there in zip(parts, present) if not there]
            raise KeyError(f"parts of '{name}' are missing: {', '.join(missing)}")
        values = [packed.pop(part.name) for part in parts]
        if values[0].ndim == 0:
            if any(not torch.equal(values[0], value) for value in values):
                raise ValueError(f"the parts of '{name}' were stepped apart; load them with --without pack")
            packed[name] = values[0]
        else:
            packed[name] = torch.cat(values)
    return packed
