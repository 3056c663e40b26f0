"""optimizer: clip, guard, update, bf16 copy and EMA in the fewest passes over memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, StepParts, claim
from vlaforge.kernels.native import compiler


class Optimizer(Pass):
    name = "optimizer"
    stage = "step"
    numerics = "reorder"
    order = 100

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        kernel = "one multi-tensor kernel" if options.device_kind.cuda else "one native loop"
        if not options.device_kind.cuda and compiler() is None:
            kernel = "torch's fused kernel (no C compiler was found for ours)"
        return Decision(True, f"clip, guard and AdamW in {kernel}{', shard by shard' if options.sharded else ''}")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [Site("optimizer", "update", (claim("optimizer", ""),))]

    def apply(self, target: StepParts, sites: Sequence[Site], context: Context) -> None:
        if target.optimizer is not None:
            target.optimizer.fuse()
