"""Would a CUDA graph of this step be right? Runs it under dispatch modes and names what stands in the way.

    report = check_step(step, minibatches)
    report.ok, report.text()

What breaks a capture, or stalls the host in every step without one:

  sync      the host reads a value of the device: `.item()`, `bool(tensor)`, `.tolist()`, `torch.equal`
  shape     a shape that depends on data: `nonzero`, boolean indexing, `unique`, `repeat_interleave` without a size
  transfer  host memory travels to the device or back: `torch.tensor([...])`, `.cpu()`, `from_numpy`
  alloc     page-locked memory is allocated, or the allocator is told to let go
  random    an RNG is used: a step's randomness comes in through its draw

The ops are the same on any device, so the CPU finds them: no GPU is needed. Compiled regions run eagerly while they are
watched. Each finding has the source line that caused it, of the caller's code, not of torch.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
TORCH = str(Path(torch.__file__).parent)
HERE = __file__

SYNCS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.allclose, aten.item}
SHAPES = {
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique_consecutive",
    aten.bincount: "bincount",
    aten.histogram: "histogram",
}
LINALG = {aten.linalg_inv_ex, aten.linalg_cholesky_ex, aten._linalg_eigh, aten._linalg_svd, aten.linalg_lu_factor_ex}
"""Ops whose Python wrappers check a device flag on the host."""

FROM_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray}
TO_HOST = {Tensor.cpu, Tensor.numpy, Tensor.tolist, Tensor.__array__}
PINNED = {Tensor.pin_memory, torch.cuda.empty_cache, torch.cuda.synchronize}
SIZED = "output_size"


@dataclass(frozen=True)
class Finding:
    """One kind of hindrance at one source line, and how often a step runs into it."""

    kind: str
    what: str
    where: str
    code: str
    count: int = 1

    def text(self) -> str:
        times = f" ×{self.count}" if self.count > 1 else ""
        return f"{self.kind:<8} {self.what}{times}\n         {self.where}: {self.code}"


@dataclass(frozen=True)
class Report:
    """What `check_step` found, most frequent first."""

    findings: tuple[Finding, ...]
    ops: int

    @property
    def ok(self) -> bool:
        return not self.findings

    def text(self) -> str:
        if self.ok:
            return f"ready for capture: {self.ops} ops, no host sync, no data-dependent shape, no transfer"
        lines = [finding.text() for finding in self.findings]
        head = f"not ready for capture: {len(lines)} hindrance{'s' * (len(lines) > 1)} in {self.ops} ops"
        return "\n".join([head, *lines])


class _Log:
    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str, str], int] = {}
        self.ops = 0

    def add(self, kind: str, what: str) -> None:
        where, code = source_line()
        key = (kind, what, where, code)
        self.counts[key] = self.counts.get(key, 0) + 1

    def report(self) -> Report:
        rows = sorted(self.counts.items(), key=lambda row: -row[1])
        return Report(tuple(Finding(*key, count) for key, count in rows), self.ops)


def source_line() -> tuple[str, str]:
    """``file:line`` and the text of the innermost frame outside torch and this module; during a backward there is no
    Python frame of the op, and the line that called it is given."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(TORCH) and name != HERE and not name.startswith("<"):
            return f"{_short(name)}:{frame.f_lineno}", linecache.getline(name, frame.f_lineno).strip()
        frame = frame.f_back
    return "?", ""


def _short(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[-3:]).replace("//", "/")


class _Dispatch(TorchDispatchMode):
    """Sees every op that reaches a kernel, backward and optimiser included."""

    def __init__(self, log: _Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.log.ops += 1
        packet = getattr(func, "overloadpacket", func)
        kind, what = classify(packet, func, args, kwargs)
        if kind:
            self.log.add(kind, what)
        return func(*args, **kwargs)


def classify(packet: Any, func: Any, args: tuple, kwargs: dict) -> tuple[str, str]:
    """The kind of hindrance that an op is, and its name; two empty strings for a harmless one."""
    name = str(packet).split(".")[-1]
    if packet in SYNCS:
        return "sync", "value read by the host (.item(), bool, float, index)" if "local_scalar" in name else name
    if packet in SHAPES:
        return "shape", SHAPES[packet]
    if packet in LINALG:
        return "sync", name
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return "shape", "indexing with a boolean mask"
    if packet is aten.repeat_interleave and kwargs.get(SIZED) is None:
        return "shape", "repeat_interleave without output_size"
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(packet, args, kwargs):
        return "random", name
    if torch.Tag.data_dependent_output in func.tags:
        return "sync", name
    if torch.Tag.dynamic_output_shape in func.tags and packet not in (aten.index, aten.repeat_interleave):
        return "shape", name
    return "", ""


def _draws(packet: Any, args: tuple, kwargs: dict) -> bool:
    """Attention ops carry the RNG tag for their dropout: they count only when it is above zero."""
    if "attention" not in str(packet):
        return True
    schema = packet.default._schema.arguments if hasattr(packet, "default") else ()
    for position, argument in enumerate(schema):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return value > 0.0
    return True


class _Functions(TorchFunctionMode):
    """Sees the Python calls that never become an op of their own: transfers and pinned memory."""

    def __init__(self, log: _Log):
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in FROM_HOST and not (args and isinstance(args[0], Tensor)):
            self.log.add("transfer", f"{func.__name__} makes a tensor from host values")
        elif func in TO_HOST:
            self.log.add("transfer", f"{func.__name__} copies to the host")
        elif func in PINNED:
            self.log.add("alloc", func.__name__)
        elif func is Tensor.to and _to_host(args, kwargs):
            self.log.add("transfer", "to('cpu') copies to the host")
        return func(*args, **kwargs)


def _to_host(args: tuple, kwargs: dict) -> bool:
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, str):
        return target.startswith("cpu")
    return False


class Watch:
    """A ``with`` block that is watched; `report()` afterwards. Compiled regions run eagerly inside, to be seen."""

    def __init__(self) -> None:
        self._log = _Log()
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(_Functions(self._log))
        self._stack.enter_context(_Dispatch(self._log))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def report(self) -> Report:
        return self._log.report()


def check_step(step: Callable[..., Any], *args: Any, warmup: int = 1, **kwargs: Any) -> Report:
    """Calls ``step(*args, **kwargs)`` `warmup` times as it is (lazy state is made then), once watched, and reports.

    The watched call is a real one: a training step trains. Nothing is reported for the warm-up.
    """
    for _ in range(warmup):
        step(*args, **kwargs)
    with Watch() as watch:
        step(*args, **kwargs)
    return watch.report()


def only(report: Report, kinds: Iterable[str]) -> tuple[Finding, ...]:
    """The findings of these kinds."""
    wanted = set(kinds)
    return tuple(finding for finding in report.findings if finding.kind in wanted)
