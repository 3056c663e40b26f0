"""graph_step: the whole optimiser step (forward, backward, reduction, clip, update) as one CUDA graph.

Thousands of launches become one. Needs shapes that repeat and a step without a host sync, which `graphs.check` holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.graphs.capture import CapturedStep
from vlaforge.graphs.overlap import frozen_encoders
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, StepParts, claim
from vlaforge.graphs.passes.static_shapes import varying

WARMUP, WARMUP_DDP = 3, 11
"""Eager steps before a capture. DDP rebuilds its buckets, and may only be captured, after eleven on a side stream."""


def repeating(context: Context) -> Decision:
    """Whether the shapes that reach the device come from a small set."""
    trims = varying(context.contract)
    if trims and "trim_tokens" in context.on and "static_shapes" not in context.on:
        return Decision(False, f"length of {trims[0].mask} varies: add `static_shapes`")
    return Decision(True, "")


class GraphStep(Pass):
    name = "graph_step"
    stage = "step"
    numerics = "exact"
    order = 120

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        if not options.device_kind.cuda:
            return Decision(False, "needs a CUDA device")
        shapes = repeating(context)
        if not shapes.on:
            return shapes
        if options.sharded:
            return Decision(False, "FSDP's gathers are not captured (`graph_blocks` neither): compile is what helps")
        if options.strategy == "ddp" and options.accumulate > 1:
            return Decision(False, "DDP switches its reduction between micro-batches, outside of a graph")
        if frozen_encoders(model, context) and "overlap" not in context.on:
            return Decision(False, "frozen encoders would run inside of the step: add `overlap`")
        micro = f", {options.accumulate} micro-batches" if options.accumulate > 1 else ""
        reduce = ", reduction" if options.strategy == "ddp" else ""
        return Decision(True, f"forward, backward{reduce}, clip and update{micro} in one graph a shape")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [Site("step", "step", (claim("capture", ""),))]

    def apply(self, target: StepParts, sites: Sequence[Site], context: Context) -> None:
        warmup = context.options.graph_warmup or WARMUP
        if context.options.strategy == "ddp":
            warmup = max(warmup, WARMUP_DDP)
        target.step = CapturedStep(target.step, target.device, warmup=warmup)
