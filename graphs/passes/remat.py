"""remat: the repeated blocks forget activations in the forward and compute them again in the backward.

`full` keeps only each block's inputs. `selective` also keeps what is dear to compute (matrix products, attention) and
recomputes what is cheap (norms, activations, rotary): most of the memory for a few percent of the time. Models draw
no random numbers in `loss`, so no RNG state is saved or restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.graphs.patterns import select
from vlaforge.kernels import cpu
from vlaforge.kernels.native import attention as tiled

aten = torch.ops.aten
DEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    *cpu.PRODUCTS,
    cpu.ATTENTION,
    tiled.ATTENTION,
}
"""Ops whose outputs `selective` keeps; `keep_output` adds a kernel's own."""


def keep_output(op: Any) -> None:
    """Has `selective` keep the outputs of `op` (an OpOverload), for kernels that are dear to run again."""
    DEAR.add(op)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


class Recomputed:
    """A block's forward under `torch.utils.checkpoint`; keeps the block's own way of being called."""

    def __init__(self, forward: Callable[..., Any], selective: bool):
        self.inner = forward
        kwargs = {"context_fn": _contexts} if selective else {}
        self.run = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return self.run(*args, **kwargs)


class Remat(Pass):
    name = "remat"
    numerics = "exact"
    order = 70

    def decide(self, model: nn.Module, context: Context) -> Decision:
        mode = self.mode(context)
        if context.options.remat_skip and not context.options.remat_modules:
            self._chosen(model, context)  # says what is missing
        if mode == "none":
            return Decision(False, "activations are kept (--remat selective or full saves memory)")
        if context.options.remat_modules:
            return Decision(True, f"{mode}: the {len(self._chosen(model, context))} modules that were named")
        kept = "block inputs" if mode == "full" else "block inputs, matrix products, attention"
        return Decision(True, f"{mode}: keeps {kept}")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        if context.options.remat_modules:
            # A part that `pack` joins with others is no module any more.
            aspects = ("recompute", "storage")
            return [Site(p, p, tuple(claim(aspect, p) for aspect in aspects)) for p in self._chosen(model, context)]
        return [Site(name, group.path, (claim("recompute", name),)) for group in model.blocks() for name in group.names]

    @staticmethod
    def _chosen(model: nn.Module, context: Context) -> list[str]:
        options = context.options
        flags = ("--activation-checkpoint-module-patterns", "--activation-checkpoint-skip-modules")
        return select(model, options.remat_modules, options.remat_skip, *flags)

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            block = target.get_submodule(site.path)
            block.forward = Recomputed(block.forward, self.mode(context) == "selective")

    def mode(self, context: Context) -> str:
        """The option. Without it, named modules mean `full`, and asking for the pass by name means `selective`."""
        if context.options.remat == "none" and context.options.remat_modules:
            return "full"
        if context.options.remat == "none" and self.name in context.asked:
            return "selective"
        return context.options.remat
