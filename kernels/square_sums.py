"""Σ x² of each of many tensors, in one pass: what a global gradient norm, and one a parameter group, are made of.

    out_i = Σ x_i²

Sums run in fp32, over the chunks of a tensor in a fixed order. An infinite or undefined element makes its sum so, which
is what the guard looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlaforge.kernels.addresses import BLOCK, BLOCKS, CHUNK, Addresses, dtype_of, locate, pointer, read
from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import launch, op
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch


def reference(tensors: Sequence[Tensor]) -> Tensor:
    """The formula in plain torch."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square()


# ---- kernels


@triton.jit
def _squares_kernel(
    table_ptr, owner_ptr, partial_ptr, X: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Σ x² of one chunk."""
    row, start, numel = locate(table_ptr, owner_ptr, 1, WIDTH * COUNT)
    x_ptr = pointer(row, X, ALIGNED)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    if start + WIDTH * COUNT <= numel:
        for block in range(COUNT):
            x = read(x_ptr, start + block * WIDTH + tl.arange(0, WIDTH), numel, True)
            total += x * x
    else:
        for block in range(COUNT):
            x = read(x_ptr, start + block * WIDTH + tl.arange(0, WIDTH), numel, False)
            total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _gather_kernel(table_ptr, partial_ptr, out_ptr, chunk, WIDTH: tl.constexpr):
    """One program a tensor: the sum of its chunks, in order."""
    row = table_ptr + tl.program_id(0) * 3
    first = tl.load(row + 2)
    last = first + (tl.load(row + 1) + chunk - 1) // chunk
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(first, last, WIDTH):
        at = start + tl.arange(0, WIDTH)
        total += tl.load(partial_ptr + at, mask=at < last, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


# ---- launcher and registration


@op("square_sums", lambda tensors: tensors[0].new_empty(len(tensors), dtype=torch.float32))
def _square_sums(tensors: list[Tensor]) -> Tensor:
    tensors = [tensor.contiguous() for tensor in tensors]
    places = Addresses.of([tensors])
    partial = tensors[0].new_empty(places.chunks, dtype=torch.float32)
    out = tensors[0].new_empty(len(tensors), dtype=torch.float32)
    launch(
        _squares_kernel, (places.chunks,), places.table, places.owner, partial,
        X=dtype_of(tensors), ALIGNED=places.aligned, WIDTH=BLOCK, COUNT=BLOCKS, num_warps=4,
    )  # fmt: skip
    launch(_gather_kernel, (len(tensors),), places.table, partial, out, CHUNK, WIDTH=BLOCK, num_warps=4)
    return out


# ---- public


def supports(tensors: Sequence[Tensor]) -> Decision:
    """fp32, bf16 and fp16, also mixed; no gradient."""
    others = {tensor.dtype for tensor in tensors} - set(FLOATS)
    if others:
        given = ", ".join(sorted(map(str, others)))
        return Decision(False, f"square_sums takes fp32, bf16 and fp16, not {given}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return Decision(False, "square_sums gives no gradient")
    return YES


def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of each tensor, fp32 [n]; one launch over all of a dtype. `tensors` must not be empty."""
    if not dispatch("square_sums", tensors[0], supports(tensors)):
        return reference(tensors)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    sums = {dtype: _square_sums(part) for dtype, part in by_dtype.items()}
    if len(sums) == 1:
        return next(iter(sums.values()))
    each = {dtype: iter(part.unbind()) for dtype, part in sums.items()}
    return torch.stack([next(each[tensor.dtype]) for tensor in tensors])


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    d, f = case.sizes["D"], case.sizes["F"]
    shapes = [(d, d), (f, d), (d, f), (d,), (1,)] * case.sizes["layers"]
    kinds = [dtype if len(shape) > 1 else torch.float32 for shape in shapes]  # norms stay fp32 in bf16 models
    made = [torch.randn(s, device=device, generator=generator) for s in shapes]
    return {"tensors": [x.to(kind) for x, kind in zip(made, kinds, strict=True)]}


KERNEL = KernelSpec(
    name="square_sums",
    formula="Σ x² of each tensor",
    op=square_sums,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    caps={"layers": 1, "D": 96, "F": 300},
    cases=(
        Case("pi05 language", {"layers": 4, "D": 2048, "F": 16384}),
        Case("pi05 expert", {"layers": 18, "D": 1024, "F": 4096}),
        Case("odd", {"layers": 1, "D": 33, "F": 700}),
    ),
)
