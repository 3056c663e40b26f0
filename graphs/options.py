"""What the person asked for, as far as the plan needs to know it: one frozen object, made by the runtime.

Defaults give the plan of a single-device fp32 run: every pass that is exact or only reorders sums and that applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from vlaforge.data.dtypes import LONG
from vlaforge.data.errors import UserError
from vlaforge.graphs.devices import DeviceKind, detect, device_kind

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PlanOptions:
    """Inputs of `make_plan`.

    Args:
        dtype: compute dtype, ``float32``, ``bfloat16`` or ``float16`` (``fp32``, ``bf16`` and ``fp16`` are accepted).
        device: ``auto``, or the name of a device kind (`graphs.devices.KINDS`): a plan for a GPU can be made without
            one.
        compile: ``on`` | ``off`` | ``auto`` (on for a GPU; off for a CPU, where a short run never earns it back).
        remat: ``none`` | ``selective`` | ``full`` recompute of the repeated blocks in the backward.
        remat_modules, remat_skip: patterns (`graphs.patterns`) of the modules to recompute instead of the blocks, and
            of those to keep after all; they mean ``full`` unless `remat` says ``selective``.
        batch_size: samples of one micro-batch on one device.
        accumulate: micro-batches of one optimiser step.
        world: number of devices.
        strategy: how the model is wrapped: ``none`` | ``ddp`` | ``zero1`` | ``fsdp`` | ``hsdp``.
        frozen: parameter names that do not train (resolved by the runtime from patterns).
        groups: parameter name → name of its optimiser group; parameters of different groups are not packed together.
        fading: name of an optimiser group → the largest share of a weight that one update takes when the weight has
            never had a gradient (AdamW: lr · weight decay); a group that is not there is not known.
        embodiments: numbers of the embodiments that the data has; None: not known.
        fp32_masters: keep fp32 master weights when the compute dtype is bf16.
        adapters: LoRA adapters are attached (their base weights must keep their own storage).
        buckets: for `static_shapes`: multiple that trimmed axes are rounded up to; 0 takes the contract's own.
        graph_warmup: eager steps before a CUDA graph is captured; None takes the pass's own number.
        with_, without: passes asked for, or switched off, by name.
        fuel: apply only the first `fuel` sites of the plan, in its order; None applies all.
    """

    dtype: str = "float32"
    device: str = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    remat: Literal["none", "selective", "full"] = "none"
    remat_modules: tuple[str, ...] = ()
    remat_skip: tuple[str, ...] = ()
    batch_size: int = 1
    accumulate: int = 1
    world: int = 1
    strategy: Literal["none", "ddp", "zero1", "fsdp", "hsdp"] = "none"
    frozen: frozenset[str] = frozenset()
    groups: Mapping[str, str] = field(default_factory=dict)
    fading: Mapping[str, float] = field(default_factory=dict)
    embodiments: frozenset[int] | None = None
    fp32_masters: bool = True
    adapters: bool = False
    buckets: int = 0
    graph_warmup: int | None = None
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    fuel: int | None = None
    device_kind: DeviceKind = field(init=False)

    def __post_init__(self) -> None:
        dtype = LONG.get(self.dtype, self.dtype)
        if dtype not in DTYPES:
            raise UserError(f"dtype '{self.dtype}' is not known: give one of {', '.join(DTYPES)}.")
        for name, allowed in (("compile", ("auto", "on", "off")), ("remat", ("none", "selective", "full"))):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} '{getattr(self, name)}' is not known: give one of {', '.join(allowed)}.")
        if self.fuel is not None and self.fuel < 0:
            raise UserError(f"fuel is {self.fuel}: give how many sites to change, 0 or more.")
        both = sorted(set(self.with_) & set(self.without))
        if both:
            raise UserError(f"Pass '{both[0]}' is both in --with and in --without: leave it out of one of them.")
        object.__setattr__(self, "dtype", dtype)
        kind = detect() if self.device == "auto" else device_kind(self.device)
        object.__setattr__(self, "device_kind", kind)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded between steps; then they keep their own storage."""
        return self.strategy in ("zero1", "fsdp", "hsdp")

    @property
    def compiles(self) -> bool:
        """Whether `compile_blocks` is wanted: `compile`, or what `auto` means on this device."""
        return self.compile == "on" or (self.compile == "auto" and self.device_kind.cuda)
