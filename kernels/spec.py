"""What an op is (`KernelSpec`) and which executor runs it (`dispatch`).

The choice is explicit and can be seen. CUDA tensors go to Triton; everything else runs the plain-torch
reference, which `torch.compile` fuses; with TRITON_INTERPRET=1 CPU tensors go to Triton's interpreter. An
input that a kernel does not support falls back to the reference with a warning that says why.
`use("reference")` and `use("triton")` force one, and forcing what cannot run is an error. `choices()` counts
what was chosen, also while `torch.compile` traces.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vlaforge.kernels.compat import HAS_TRITON

log = logging.getLogger("vlaforge.kernels")

INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
"""Whether Triton's interpreter runs the kernels: read once, as Triton does when kernels are defined."""

Executor = Literal["auto", "triton", "reference"]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class KernelError(RuntimeError):
    """An executor was asked for that cannot run here, or with these inputs."""


@dataclass(frozen=True)
class Decision:
    """Whether a kernel takes the inputs, and the reason a person reads when it does not."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Decision(True)


@dataclass(frozen=True)
class Case:
    """One set of sizes and options of an op, named after the place in a model where it occurs."""

    name: str
    sizes: Mapping[str, Any]

    def capped(self, caps: Mapping[str, int]) -> Case:
        """The same case with the named axes no longer than `caps`: widths stay real, counts get small."""
        small = {axis: min(size, caps[axis]) if axis in caps else size for axis, size in self.sizes.items()}
        return replace(self, sizes=small)


@dataclass(frozen=True)
class KernelSpec:
    """Everything that the tests and the benchmark need to know about one op.

    Args:
        name: the op's name: of the file, of the public function and in tables.
        formula: one line of maths.
        op: the function under test, called as ``op(**inputs)``; returns a tensor or a tuple of tensors.
        reference: the same in plain torch.
        inputs: ``inputs(case, dtype, device, generator)`` → keyword arguments of `op`.
        cases: shapes of real models, and an odd one.
        supports: ``supports(**inputs)`` → Decision.
        grads: names of the inputs that get gradients; empty for an op without a backward.
        tolerances: dtype → largest error, as `check.Difference` measures it.
        caps: axis → longest length under the interpreter.
        timed: what the benchmark times instead of `op` and `reference`, where those copy what is changed in place.
    """

    name: str
    formula: str
    op: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[Case, torch.dtype, torch.device, torch.Generator | None], dict[str, Any]]
    cases: tuple[Case, ...]
    supports: Callable[..., Decision]
    grads: tuple[str, ...] = ()
    tolerances: Mapping[torch.dtype, float] = field(
        default_factory=lambda: {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
    )
    caps: Mapping[str, int] = field(default_factory=dict)
    timed: tuple[Callable[..., Any], Callable[..., Any]] | None = None


@cache
def available() -> dict[str, KernelSpec]:
    """Name → spec of every op: the modules of this folder that define `KERNEL`."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if "\nKERNEL = " in path.read_text():
            spec = importlib.import_module(f"vlaforge.kernels.{path.stem}").KERNEL
            found[spec.name] = spec
    return found


_forced: Executor = "auto"
_choices: Counter[tuple[str, str, str]] = Counter()
_warned: set[tuple[str, str]] = set()


@contextmanager
def use(executor: Executor) -> Iterator[None]:
    """Forces one executor inside the context. Compiled functions guard on it and are traced again."""
    global _forced
    if executor not in ("auto", "triton", "reference"):
        raise KernelError(f"unknown executor {executor!r}: auto, triton or reference")
    before, _forced = _forced, executor
    try:
        yield
    finally:
        _forced = before


def choices() -> dict[tuple[str, str, str], int]:
    """(op, executor, reason) → how often it was chosen in this process; compiled code counts once a trace."""
    return dict(_choices)


def dispatch(op: str, x: Tensor, decision: Decision) -> bool:
    """True when the Triton kernel of `op` shall run on `x`, False for the reference."""
    if _forced == "reference":
        return _note(op, "reference", "forced")
    where = runs_on(x.device.type)
    if where.ok and decision.ok:
        return _note(op, "triton", "")
    reason = where.reason or decision.reason
    if _forced == "triton":
        raise KernelError(f"{op}: the Triton kernel was asked for, but {reason}")
    return _note(op, "reference", reason, warn=where.ok)


def runs_on(device: str) -> Decision:
    """Whether Triton can run on tensors of this device type in this process."""
    if not HAS_TRITON:
        return Decision(False, "triton is not installed (pip install triton; Linux only)")
    if device == "meta":
        return YES  # shapes only: the ops' fake implementations answer
    if INTERPRET:
        return YES if device == "cpu" else Decision(False, "TRITON_INTERPRET=1 runs CPU tensors only")
    return YES if device == "cuda" else Decision(False, f"the tensors are on {device}, Triton needs cuda")


@torch.compiler.assume_constant_result
def _note(op: str, executor: str, reason: str, warn: bool = False) -> bool:
    """Counts a choice, and warns of a fallback once. Constant to the compiler: it runs once a trace."""
    _choices[op, executor, reason] += 1
    if warn and (op, reason) not in _warned:
        _warned.add((op, reason))
        log.warning("%s runs its plain-torch reference: %s", op, reason)
    return executor == "triton"
