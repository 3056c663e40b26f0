"""How Python reaches the C loops, and how torch reaches what is built on them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vlaforge_cpu", "DEF")


def op(schema: str, cpu: Callable[..., Any], meta: Callable[..., Any]) -> torch._ops.OpOverload:
    """Registers ``vlaforge_cpu::<schema>``: what it does, and what shapes it gives."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, meta, "Meta")
    return getattr(torch.ops.vlaforge_cpu, name).default


def call(function: Any, *args: Any) -> Any:
    """A C function on tensors (their addresses; None is null), ints (int64), floats (double), bools (int) and lists of
    the first two (arrays); what is C's already goes as it is."""
    return function(*map(_argument, args))


def threads() -> ctypes.c_int:
    """How many a loop may use: torch's setting."""
    return ctypes.c_int(torch.get_num_threads())


def _argument(value: Any) -> Any:
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(_address(value))
    if isinstance(value, bool):
        return ctypes.c_int(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    if isinstance(value, Sequence):
        if all(isinstance(each, int) for each in value):
            return (ctypes.c_int64 * len(value))(*value)
        return (ctypes.c_void_p * len(value))(*map(_address, value))
    return value


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
