"""Compares an op's Triton kernels with its reference: values and gradients, in any memory layout.

The tests use it (in Triton's interpreter), the benchmark on a GPU before it times, and who adds a kernel:

    TRITON_INTERPRET=1 python -c "from vlaforge.kernels.check import report; print(report('rms_norm'))"
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vlaforge.kernels.spec import INTERPRET, Case, KernelSpec, available, use

Layout = Literal["contiguous", "padded", "transposed"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "padded", "transposed")


@dataclass(frozen=True)
class Difference:
    """How far one output or gradient is off: the largest |a - b| / (|b| + rms(b)), and what is allowed."""

    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.error:.2e} {'≤' if self.ok else '>'} {self.limit:.1e}"


def case_named(spec: KernelSpec, name: str) -> Case:
    return next(case for case in spec.cases if case.name == name)


def strided(x: Tensor, layout: Layout) -> Tensor:
    """The same values in another layout: rows with gaps between, or the last two axes swapped in memory."""
    if layout == "contiguous" or x.ndim < 2:
        return x
    if layout == "padded":
        room = x.new_zeros((*x.shape[:-1], x.shape[-1] + 8))
        return room[..., : x.shape[-1]].copy_(x)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _map(value: Any, change) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_map(item, change) for item in value] if isinstance(value, list) else value


def _outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _run(function, inputs: dict[str, Any], grads: tuple[str, ...], cotangents: list[Tensor] | None):
    """(name → outputs, and gradients of the inputs in `grads` against the cotangents; those cotangents)."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in grads if inputs.get(name) is not None}
    outputs = _outputs(function(**{**inputs, **leaves}))
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    if not leaves:
        return named, cotangents
    with_grad = [output for output in outputs if output.requires_grad]
    if cotangents is None:
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        cotangents = [torch.randn(o.shape, device=o.device, generator=generator).to(o.dtype).float() for o in with_grad]
    given = [c.to(o.dtype) for c, o in zip(cotangents, with_grad, strict=True)]
    gradients = torch.autograd.grad(with_grad, list(leaves.values()), given, allow_unused=True)
    named |= {f"grad {n}": g for n, g in zip(leaves, gradients, strict=True) if g is not None}
    return named, cotangents


def compare(
    spec: KernelSpec,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    layout: Layout = "contiguous",
) -> list[Difference]:
    """The kernel on inputs of `dtype` and `layout` against the reference on the same values in fp32."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    inputs = spec.inputs(case, dtype, device, generator)
    exact = {name: _map(value, lambda x: x.float() if x.is_floating_point() else x) for name, value in inputs.items()}
    laid_out = {name: _map(value, lambda x: strided(x, layout)) for name, value in inputs.items()}
    with use("triton"):
        got, cotangents = _run(spec.op, laid_out, spec.grads, None)
    with use("reference"):
        expected, _ = _run(spec.reference, exact, spec.grads, cotangents)
    if got.keys() != expected.keys():
        raise AssertionError(f"{spec.name} gives {sorted(got)}, the reference {sorted(expected)}")
    return [_difference(name, got[name], expected[name], spec.tolerances[dtype]) for name in got]


def _difference(name: str, got: Tensor, expected: Tensor, limit: float) -> Difference:
    if got.shape != expected.shape:
        raise AssertionError(f"{name} has shape {list(got.shape)}, the reference {list(expected.shape)}")
    a, b = got.double(), expected.double()
    error = (a - b).abs() / (b.abs() + b.square().mean().sqrt() + 1e-30)
    return Difference(name, float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0, limit)


def report(name: str, device: str = "cpu") -> str:
    """Every case, dtype and layout of one op as text; counts are capped under the interpreter."""
    return "\n".join(_lines(available()[name], device))


def _lines(spec: KernelSpec, device: str) -> Iterator[str]:
    for case in spec.cases:
        small = case.capped(spec.caps) if INTERPRET else case
        for dtype in spec.tolerances:
            for layout in LAYOUTS:
                found = ", ".join(str(d) for d in compare(spec, small, dtype, device, layout))
                yield f"{case.name} {dtype} {layout}: {found}"
