"""What a named device can do: peak rates, memory and links, for the plan, the cost model and the profile.

Figures are the vendors' dense (not sparse) ones. `cpu` stands for "whatever this machine has": its rates are measured
on demand (`measured_cpu`), because no table knows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from vlaforge.data.errors import unknown

TERA, GIGA = 1e12, 1e9
GIB = 1024**3


@dataclass(frozen=True)
class DeviceKind:
    """Rates of one device.

    Args:
        name: as `--device-kind` takes it.
        label: as the plan prints it.
        bf16, fp32, fp8: dense matrix FLOP/s (fp32 without TF32); 0 where unknown or absent.
        bandwidth: bytes/s of its memory.
        memory: bytes.
        link: bytes/s to a neighbour device, one direction.
        launch_s: what one kernel launch from eager Python costs the host (estimate).
        capability: CUDA compute capability; None for the CPU.
    """

    name: str
    label: str
    bf16: float
    fp32: float
    fp8: float
    bandwidth: float
    memory: float
    link: float = 0.0
    launch_s: float = 5e-6
    capability: tuple[int, int] | None = None

    @property
    def cuda(self) -> bool:
        return self.capability is not None

    def flops(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s of matrix products whose inputs have `dtype`."""
        return self.bf16 if dtype in (torch.bfloat16, torch.float16) else self.fp32


KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind("cpu", "CPU", 0, 0, 0, 0, 0, launch_s=5e-6),
        DeviceKind("h200", "H200", 989 * TERA, 67 * TERA, 1979 * TERA, 4.8e12, 141 * GIGA, 450e9, 5e-6, (9, 0)),
        DeviceKind("h100", "H100", 989 * TERA, 67 * TERA, 1979 * TERA, 3.35e12, 80 * GIGA, 450e9, 5e-6, (9, 0)),
        DeviceKind("a100", "A100", 312 * TERA, 19.5 * TERA, 0, 2.04e12, 80 * GIGA, 300e9, 5e-6, (8, 0)),
        DeviceKind("b200", "B200", 2250 * TERA, 75 * TERA, 4500 * TERA, 8.0e12, 180 * GIGA, 900e9, 5e-6, (10, 0)),
        DeviceKind(
            "rtx_pro_6000", "RTX PRO 6000", 503 * TERA, 125 * TERA, 1007 * TERA, 1.79e12, 96 * GIGA, 32e9, 5e-6, (12, 0)
        ),
    )
}


def device_kind(name: str) -> DeviceKind:
    """The kind called `name` (case, '-' and '_' do not count); UserError names the nearest."""
    wanted = name.lower().replace("-", "_").replace(" ", "_")
    if wanted not in KINDS:
        raise unknown("device kind", name, KINDS)
    return KINDS[wanted]


def detect() -> DeviceKind:
    """The kind of this machine's first CUDA device, or `cpu`. An unlisted GPU gets its own memory size and the rates
    of the listed kind with the same compute capability (or the oldest)."""
    if not torch.cuda.is_available():
        return KINDS["cpu"]
    props = torch.cuda.get_device_properties(0)
    fold = props.name.lower().replace("-", "_").replace(" ", "_")
    for name in sorted(KINDS, key=len, reverse=True):
        if name != "cpu" and name in fold:
            return KINDS[name]
    capability = (props.major, props.minor)
    like = next((kind for kind in KINDS.values() if kind.capability == capability), KINDS["a100"])
    return DeviceKind(
        "cuda", props.name, like.bf16, like.fp32, like.fp8, like.bandwidth, props.total_memory, like.link,
        like.launch_s, capability,
    )  # fmt: skip


@cache
def measured_cpu() -> DeviceKind:
    """This machine's CPU with rates measured now, with torch's present number of threads, in about 0.2 s: products of
    1024 × 1024 by the fastest library there is, and a copy of 128 MiB (read and write)."""
    a = torch.randn(1024, 1024)
    low, source = a.to(torch.bfloat16), torch.ones(2**25)
    target = torch.empty_like(source)
    work = 2 * 1024**3
    products = [lambda: a @ a]
    if torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], ""))
    return replace(
        KINDS["cpu"],
        fp32=work / min(_fastest(product) for product in products),
        bf16=work / _fastest(lambda: low @ low),
        bandwidth=2 * source.numel() * 4 / _fastest(lambda: target.copy_(source)),
    )


def _fastest(run: Callable[[], Any], times: int = 4) -> float:
    run()
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
