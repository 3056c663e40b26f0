"""What a kernel costs on a GPU, found without one: cross-compile each launch and read the machine code's needs.

The public functions run on meta tensors of the real shapes while their launches are recorded; each distinct launch is
compiled for an architecture with the specialisation that Triton's launcher would choose, and `cuobjdump` (part of
Triton) reports registers, stack and shared memory of the result. A stack means that registers spill to local memory.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlaforge.kernels.launch import Launch, record_launches
from vlaforge.kernels.spec import INTERPRET, Case, KernelError, KernelSpec, use

ARCHITECTURES: dict[int, tuple[str, int]] = {
    80: ("A100", 163 * 1024),
    90: ("H100, H200", 227 * 1024),
    100: ("B200", 227 * 1024),
}
"""Compute capability · 10 → (GPUs, most shared memory of one program in bytes)."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Build:
    """One compiled kernel: for what, and what it needs. Bytes; `stack` is a thread's."""

    op: str
    kernel: str
    case: str
    dtype: str
    architecture: int
    config: str
    registers: int
    stack: int
    shared: int

    @property
    def limit(self) -> int:
        return ARCHITECTURES[self.architecture][1]

    @property
    def faults(self) -> list[str]:
        """Why it may not be used; empty when it may."""
        found = []
        if self.stack:
            found.append(f"spills: {self.stack} bytes of stack a thread")
        if self.shared > self.limit:
            found.append(f"{self.shared} bytes of shared memory, {self.limit} exist")
        return found


def record(spec: KernelSpec, case: Case, dtype: torch.dtype) -> list[Launch]:
    """The launches, forward and backward, of one case at its full size."""
    inputs = spec.inputs(case, dtype, torch.device("meta"), None)
    leaves = {name: inputs[name].detach().requires_grad_() for name in spec.grads if inputs.get(name) is not None}
    with use("triton"), record_launches() as launches:
        outputs = spec.op(**{**inputs, **leaves})
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        outputs = [output for output in outputs if output.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, list(leaves.values()), [torch.empty_like(o) for o in outputs])
    return launches


def specialise(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list]]:
    """(signature, constants, attributes) as Triton's own launcher specialises the arguments."""
    names = list(inspect.signature(launch.kernel.fn).parameters)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    for place, name in enumerate(names):
        value = launch.constants[name] if name in launch.constants else launch.args[place]
        kind, constant, aligned = _argument(value, name in launch.constants)
        signature[name] = kind
        if constant:
            constants[place,] = value
        elif aligned:
            attributes[place,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _argument(value: Any, fixed: bool) -> tuple[str, bool, bool]:
    """(type in the signature, whether its value is compiled in, whether it is a multiple of 16)."""
    if fixed or value is None or (isinstance(value, int) and value == 1):
        return "constexpr", True, False
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}", False, value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", False, value % 16 == 0
    return "fp32", False, False


def build(spec: KernelSpec, case: Case, dtype: torch.dtype, launch: Launch, architecture: int) -> Build:
    """Compiles one launch for compute capability `architecture` / 10; Triton's cache makes the second time quick."""
    if INTERPRET:
        raise KernelError("kernels defined under TRITON_INTERPRET=1 cannot be compiled: unset it")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = specialise(launch)
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(launch.options))
    registers, stack = _needs(compiled.asm["cubin"])
    shape = " ".join(f"{name}={value}" for name, value in launch.constants.items())
    return Build(
        op=spec.name,
        kernel=launch.kernel.fn.__name__.strip("_"),
        case=case.name,
        dtype=str(dtype).removeprefix("torch."),
        architecture=architecture,
        config=f"{shape} warps={launch.options['num_warps']}",
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
    )


def _needs(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread, from the machine code's own table."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(knobs.nvidia.cuobjdump.path)
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    if found is None:
        raise KernelError(f"cuobjdump reported no resource usage:\n{text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def builds(
    spec: KernelSpec, architectures: tuple[int, ...] = tuple(ARCHITECTURES), one_case: bool = False
) -> Iterator[Build]:
    """Every distinct launch of the op's cases and dtypes, for each architecture; with all gradients, and with that of
    the first input alone (frozen weights).

    `one_case` keeps one configuration of each kernel: the first case's, in bf16, with all gradients.
    """
    seen = set()
    wanted = [spec] if one_case or len(spec.grads) < 2 else [spec, replace(spec, grads=spec.grads[:1])]
    for case in spec.cases[:1] if one_case else spec.cases:
        for dtype in (torch.bfloat16,) if one_case else spec.tolerances:
            for launch in (launch for some in wanted for launch in record(some, case, dtype)):
                signature, constants, attributes = specialise(launch)
                key = (launch.kernel.fn, str(signature), str(constants), str(attributes), str(launch.options))
                if key not in seen:
                    seen.add(key)
                    yield from (build(spec, case, dtype, launch, architecture) for architecture in architectures)
