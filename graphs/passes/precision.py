"""precision: bf16 weights and activations, fp32 where the model asks for it, fp32 masters for the optimiser.

The fp32 value of each trainable weight stays as the attribute `_master_fp32` of its parameter until the optimiser takes
it; a step then updates the master and writes the bf16 copy in the same pass over memory. There is no autocast: weights
are cast once, and where a value crosses between a bf16 and an fp32 module the module itself is given the cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.dtypes import SHORT
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim

CASTING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.Bilinear)
"""Leaf modules that demand the dtype of their weight; their floating inputs are cast to it."""


def kept_fp32(model: nn.Module) -> set[str]:
    """Paths of modules (with all below them) that `model.keep_fp32()` names."""
    patterns = model.keep_fp32() if hasattr(model, "keep_fp32") else []
    paths = [name for name, _ in model.named_modules() if any(fnmatchcase(name, p) for p in patterns)]
    return {
        name for name, _ in model.named_modules() if any(name == path or name.startswith(path + ".") for path in paths)
    }


def cast_inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: floating tensors take the dtype of the module's weight; a norm without one takes what comes."""
    if module.weight is None:
        return args
    dtype = module.weight.dtype
    return tuple(
        value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in args
    )


class Precision(Pass):
    name = "precision"
    numerics = "approx"
    order = 10

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        if options.dtype == "float32":
            return Decision(False, "fp32 was asked for (--dtype bf16 computes in bf16)")
        short = SHORT[options.dtype]
        reason = f"{short} compute, " + ("fp32 masters" if options.fp32_masters else f"{short} weights without masters")
        if options.sharded:
            reason = f"{short} compute, fp32 shards are the masters"
        kept = kept_fp32(model)
        held = sum(1 for name, module in model.named_modules() if name in kept and module._parameters)
        if held:
            reason += f"; fp32 in {held} modules"
        if not options.device_kind.cuda and not _cpu_bf16():
            reason += "; this CPU has no bf16 instructions, so it will be no faster than fp32"
        return Decision(True, reason)

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        kept = kept_fp32(model)
        found = []
        for name, module in model.named_modules():
            own = [p for p in module._parameters.values() if p is not None and p.dtype == torch.float32]
            if own and name not in kept:
                found.append(Site(name, type(module).__name__, (claim("dtype", name),)))
        return found

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        options = context.options
        shards = options.sharded
        done: set[int] = set()
        for site in () if shards else sites:
            for parameter in target.get_submodule(site.path)._parameters.values():
                if parameter is None or id(parameter) in done or parameter.dtype != torch.float32:
                    continue
                done.add(id(parameter))
                full = parameter.data
                parameter.data = full.to(options.torch_dtype)
                if options.fp32_masters and parameter.requires_grad:
                    parameter._master_fp32 = full
        for module in target.modules():
            if isinstance(module, CASTING):
                module.register_forward_pre_hook(cast_inputs)


def _cpu_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
