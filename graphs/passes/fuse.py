"""fuse: one table from block class to the function that runs it, for each kind of device.

On a GPU the functions are the kernels of `vlaforge.kernels`. On a CPU, elementwise work is left to `compile_blocks`
(one generated loop, forward and backward), and what can be gained is in the products: fp32 ones go to oneDNN where the
default BLAS is slower (measured), bf16 attention runs as products with a fused softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.kernels import cpu
from vlaforge.models.blocks.attention import Attention, Mask
from vlaforge.models.towers.siglip import PatchEmbed


@dataclass(frozen=True)
class Swap:
    """One line of the table.

    Args:
        block: exact class of the modules it serves.
        what: its name in the plan.
        method: which method is replaced.
        function: called as ``function(module, ...)`` in the method's place.
        fits: ``fits(module, context)``: whether it runs this module, and is worth it.
    """

    block: type[nn.Module]
    what: str
    method: str
    function: Callable[..., Any]
    fits: Callable[[nn.Module, Context], bool]


# ---------------------------------------------------------------------------------------------------- CPU


def onednn_linear(self: nn.Linear, x: Tensor) -> Tensor:
    return cpu.linear(x, self.weight, self.bias)


def onednn_patches(self: PatchEmbed, images_N3SS: Tensor) -> Tensor:
    return cpu.linear(self.patches(images_N3SS), self.weight.flatten(1), self.bias)


def product_attention(
    self: Attention, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask | None = None
) -> Tensor:
    if mask is not None and mask.is_causal:
        return type(self).forward(self, q_BHTK, k_BGSK, v_BGSK, mask)
    keys = None if mask is None else mask.keys_BS
    return cpu.attention(q_BHTK, k_BGSK, v_BGSK, keys, q_BHTK.shape[-1] ** -0.5)


def _computes(module: nn.Module, context: Context) -> torch.dtype:
    """The dtype that a module's own weights will have once `precision` has run."""
    if "precision" not in context.on:
        return torch.float32
    return context.options.torch_dtype


def _fp32_product(module: nn.Module, context: Context) -> bool:
    return cpu.prefers_onednn() and _computes(module, context) == torch.float32


def _bf16_attention(module: nn.Module, context: Context) -> bool:
    return _computes(module, context) == torch.bfloat16


CPU_TABLE = (
    Swap(nn.Linear, "linear", "forward", onednn_linear, _fp32_product),
    Swap(PatchEmbed, "patches", "forward", onednn_patches, _fp32_product),
    Swap(Attention, "attention", "forward", product_attention, _bf16_attention),
)

CUDA_TABLE: tuple[Swap, ...] = ()


def table(context: Context) -> tuple[Swap, ...]:
    return CUDA_TABLE if context.options.device_kind.cuda else CPU_TABLE


class Fuse(Pass):
    name = "fuse"
    numerics = "reorder"
    order = 20

    def decide(self, model: nn.Module, context: Context) -> Decision:
        if context.options.device_kind.cuda or self.sites(model, context):
            return Decision(True, "")
        return Decision(False, "on this CPU the default products are the fastest; the rest is left to compile_blocks")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        swaps = {swap.block: swap for swap in table(context)}
        found = []
        for name, module in model.named_modules():
            swap = swaps.get(type(module))
            if swap is not None and swap.fits(module, context):
                found.append(Site(name, swap.what, (claim(swap.method, name),)))
        return found

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        swaps = {swap.block: swap for swap in table(context)}
        for site in sites:
            module = target.get_submodule(site.path)
            swap = swaps[type(module)]
            setattr(module, swap.method, MethodType(swap.function, module))
