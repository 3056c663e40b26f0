"""Registering an op with torch, starting its kernels, and the launch sizes that the kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vlaforge.kernels.spec import KernelError, runs_on


def op(name: str, fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable], Any]:
    """Registers a launcher as ``torch.ops.vlaforge.<name>``: to the compiler one op with `fake`'s shapes.

    While launches are recorded, meta tensors run the launcher itself: what is recorded is what would start.
    """

    def register(launcher: Callable) -> Any:
        defined = torch.library.custom_op(f"vlaforge::{name}", launcher, mutates_args=tuple(mutates))
        defined.register_fake(lambda *args: (fake if _recording is None else launcher)(*args))
        return defined

    return register


def only_first_has_gradient(ctx: Any, output: Sequence[Tensor]) -> None:
    """For `setup_context`: the other outputs are statistics; their gradients are None rather than made of zeros."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@dataclass(frozen=True)
class Launch:
    """A kernel start as it would happen: what the static check compiles."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]


_recording: list[Launch] | None = None


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Inside the context no kernel starts, the list gets every launch, and meta tensors will do."""
    global _recording
    before, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = before


def launch(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int, num_stages: int = 2, **constants: Any) -> None:
    """Starts `kernel` over `grid` on the device of its first tensor; does nothing for an empty grid."""
    grid = tuple(int(size) for size in grid)
    if 0 in grid:
        return
    if _recording is not None:
        _recording.append(Launch(kernel, grid, args, constants, _options(num_warps, num_stages)))
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    here = runs_on(device.type)
    if not here:
        raise KernelError(f"{kernel.__name__} cannot start: {here.reason}")
    options = _options(num_warps, num_stages)
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **constants, **options)
    else:
        kernel[grid](*args, **constants, **options)


def _options(num_warps: int, num_stages: int) -> dict[str, Any]:
    """Fused multiply-add is asked for by name, since its default differs between versions of Triton. Registers may be
    used up to what two programs fit beside each other (one, from 16 warps on): left alone, the assembler may spill a
    few to fit a fifth."""
    registers = min(255, 65536 // (32 * num_warps * (2 if num_warps < 16 else 1)))
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, "maxnreg": registers}


@dataclass(frozen=True)
class Tile:
    """`rows` × `width` elements a program, both powers of two, and its warps."""

    rows: int
    width: int
    num_warps: int


MAX_WIDTH = 8192
"""Longest row that one program can hold in registers in a backward on sm_80 to sm_100."""

FLAT = Tile(1, 1024, 4)
"""Elementwise work: 8 elements a thread, so that bf16 loads and stores are 16 bytes wide."""


def power_of_2(size: int) -> int:
    """The next power of two ≥ size."""
    return 1 << max(0, int(size) - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def row_tile(width: int, backward: bool = False, most_rows: int = 16) -> Tile:
    """Whole rows in one program: about 2048 elements, 16 a thread; half of both in a backward, which holds more."""
    width, half = power_of_2(width), 2 if backward else 1
    rows = max(1, min(most_rows, 2048 // half // width))
    return Tile(rows, width, max(1, min(16, rows * width * half // 512)))


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device; a H200's for meta tensors, few for the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132 if device.type == "meta" else 2


def programs(work: int, device: torch.device, waves: int = 4) -> int:
    """How many programs share `work` tiles when each keeps a sum: a few per multiprocessor."""
    return min(work, waves * processors(device))


def side_by_side(x: Tensor) -> Tensor:
    """`x` itself when its last axis has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., D] as [rows, D] with stride 1 along D: a view where the strides allow it, else a copy."""
    return side_by_side(x.reshape(-1, x.shape[-1]))
