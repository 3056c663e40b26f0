"""Compares an op's Triton kernels with its reference: values and gradients, in any memory layout.

The tests use it (in Triton's interpreter), the benchmark on a GPU before it times, and who adds a kernel:

    TRITON_INTERPRET=1 python -c "from vlaforge.kernels.check import report; print(report('rms_norm'))"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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


def case_of(op: str, name: str) -> tuple[KernelSpec, Case]:
    """An op's spec and one of its cases by name; counts are capped where the interpreter will run it."""
    spec = available()[op]
    case = next(case for case in spec.cases if case.name == name)
    return spec, case.capped(spec.caps) if INTERPRET else case


def strided(x: Tensor, layout: Layout) -> Tensor:
    """The same values in another layout: rows with gaps between, or the last two axes swapped in memory."""
    if layout == "contiguous" or x.ndim < 2:
        return x
    if layout == "padded":
        room = x.new_zeros((*x.shape[:-1], x.shape[-1] + 8))
        return room[..., : x.shape[-1]].copy_(x)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_map(item, change) for item in value] if isinstance(value, list) else value


def leaves(inputs: dict[str, Any], grads: Sequence[str]) -> dict[str, Any]:
    """`inputs` with those in `grads` as leaves that ask for a gradient."""
    return {
        name: value.detach().requires_grad_() if name in grads and value is not None else value
        for name, value in inputs.items()
    }


def outputs_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _run(
    function: Callable, inputs: dict[str, Any], grads: Sequence[str], cotangents: list[Tensor] | None
) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    """(name → outputs, and gradients of the inputs in `grads` against the cotangents; those cotangents)."""
    inputs = leaves(inputs, grads)
    outputs = outputs_of(function(**inputs))
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    wanted = {name: inputs[name] for name in grads if inputs.get(name) is not None}
    if not wanted:
        return named, cotangents
    outputs = [output for output in outputs if output.requires_grad]
    if cotangents is None:
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        cotangents = [torch.randn(o.shape, device=o.device, generator=generator).to(o.dtype) for o in outputs]
    given = [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
    first, second = (torch.autograd.grad(outputs, list(wanted.values()), given, retain_graph=True) for _ in range(2))
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise AssertionError("a second backward gives other gradients: the first one overwrote what was saved")
    return named | {f"grad {name}": grad for name, grad in zip(wanted, first, strict=True)}, cotangents


def compare(
    spec: KernelSpec,
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    layout: Layout = "contiguous",
) -> list[Difference]:
    """The kernel on inputs of `dtype` and `layout` against the reference on the same values in fp32.

    AssertionError when the op changes its inputs, or its backward what was saved.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    inputs = spec.inputs(case, dtype, device, generator)
    exact = {name: _map(value, _widened) for name, value in inputs.items()}
    laid_out = {name: _map(value, lambda x: strided(x, layout)) for name, value in inputs.items()}
    before = {name: _map(value, torch.clone) for name, value in laid_out.items()}
    with use("triton"):
        got, cotangents = _run(spec.op, laid_out, spec.grads, None)
    _same_inputs(before, laid_out)
    with use("reference"):
        expected, _ = _run(spec.reference, exact, spec.grads, cotangents)
    if got.keys() != expected.keys():
        raise AssertionError(f"{spec.name} gives {sorted(got)}, the reference {sorted(expected)}")
    return [_difference(name, got[name], expected[name], spec.tolerances[dtype]) for name in got]


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _same_inputs(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        pairs = zip(value, after[name]) if isinstance(value, list) else [(value, after[name])]
        for a, b in pairs:
            if isinstance(a, Tensor) and not torch.equal(a.nan_to_num(), b.nan_to_num()):
                raise AssertionError(f"the input {name} was changed")


def _difference(name: str, got: Tensor, expected: Tensor, limit: float) -> Difference:
    if got.shape != expected.shape:
        raise AssertionError(f"{name} has shape {list(got.shape)}, the reference {list(expected.shape)}")
    a, b = got.double(), expected.double()
    error = (a - b).abs() / (b.abs() + b.square().mean().sqrt() + 1e-30)
    return Difference(name, float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0, limit)


def layouts_of(case: str) -> tuple[Layout, ...]:
    """The memory layouts to try: all of them for an odd case, what models have for the others."""
    return LAYOUTS if case.startswith("odd") else LAYOUTS[:1]


def compare_all(op: str, case: str, dtype: torch.dtype, device: str = "cpu") -> dict[Layout, list[Difference]]:
    """`compare` in each layout, by names: what a process of its own can be asked for."""
    spec, sized = case_of(op, case)
    return {layout: compare(spec, sized, dtype, device, layout) for layout in layouts_of(case)}


def compare_frozen(op: str, case: str, dtype: torch.dtype = torch.float32) -> list[Difference]:
    """`compare` where nothing but the op's first input asks for a gradient: weights and modulations are frozen."""
    spec, sized = case_of(op, case)
    return compare(replace(spec, grads=spec.grads[:1]), sized, dtype)


class _Above(TorchFunctionMode):
    """Keeps the calls of this package's registered ops as they arrive above autograd."""

    def __init__(self, calls: dict[str, tuple[Any, Sequence]]):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if isinstance(function, torch._ops.OpOverload) and function.namespace == "vlaforge":
            self.calls.setdefault(function.name(), (function, args))
        return function(*args, **(kwargs or {}))


class _Below(TorchDispatchMode):
    """The same below autograd, where the ops of a backward are seen."""

    def __init__(self, calls: dict[str, tuple[Any, Sequence]]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "vlaforge":
            self.calls.setdefault(function.name(), (function, [_map(arg, torch.detach) for arg in args]))
        return function(*args, **(kwargs or {}))


def opcheck(op: str, case: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[str]:
    """`torch.library.opcheck` of every registered op that the case runs, forward and backward; their names.

    It checks that the declared mutations are the real ones, shapes and strides of the fake implementation, the
    registration of the gradient, and that AOTAutograd traces the op with symbolic shapes.
    """
    spec, sized = case_of(op, case)
    inputs = spec.inputs(sized, dtype, torch.device(device), torch.Generator(device).manual_seed(0))
    calls: dict[str, tuple[Any, Sequence]] = {}
    with use("triton"):
        with _Above(calls):
            outputs = outputs_of(spec.op(**leaves(inputs, spec.grads)))
        outputs = [output for output in outputs if output.requires_grad]
        if outputs:
            with _Below(calls):
                torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    for function, args in calls.values():
        fresh = [_map(arg, lambda x: x.detach().clone().requires_grad_(x.requires_grad)) for arg in args]
        torch.library.opcheck(function, tuple(fresh))
    return sorted(calls)


def traced(op: str, case: str, backend: str = "aot_eager", device: str = "cpu") -> float:
    """Forward and backward under ``torch.compile(fullgraph=True)``: the largest relative difference from eager."""
    spec, sized = case_of(op, case)
    generator = torch.Generator(device).manual_seed(0)
    inputs = spec.inputs(sized, torch.float32, torch.device(device), generator)
    torch._dynamo.reset()
    eager, cotangents = _run(spec.op, inputs, spec.grads, None)
    compiled, _ = _run(torch.compile(spec.op, fullgraph=True, backend=backend), inputs, spec.grads, cotangents)
    return max(_difference(name, compiled[name], eager[name], 0.0).error for name in eager)


def report(op: str, device: str = "cpu") -> str:
    """Every case and dtype of one op as text; counts are capped under the interpreter."""
    return "\n".join(_lines(available()[op], device))


def _lines(spec: KernelSpec, device: str) -> Iterator[str]:
    for case in spec.cases:
        for dtype in spec.tolerances:
            for layout, found in compare_all(spec.name, case.name, dtype, device).items():
                yield f"{case.name} {dtype} {layout}: {', '.join(map(str, found))}"
