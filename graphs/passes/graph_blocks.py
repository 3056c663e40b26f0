"""graph_blocks: each repeated block's forward and backward as CUDA graphs, where the whole step cannot be one.

Launch overhead of the blocks goes; the wrapper (FSDP, hooks) still runs between them. Needs shapes that never change,
and no recompute inside the block.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.graphs.capture import BlockGraphs
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.graphs.passes.graph_step import repeating


class GraphBlocks(Pass):
    name = "graph_blocks"
    numerics = "exact"
    order = 90
    default = False

    def decide(self, model: nn.Module, context: Context) -> Decision:
        if not context.options.device_kind.cuda:
            return Decision(False, "needs a CUDA device")
        shapes = repeating(context)
        if not shapes.on:
            return shapes
        if "remat" in context.on:
            return Decision(False, "recompute inside a block cannot be captured (drop remat)")
        if context.options.sharded:
            return Decision(False, "FSDP frees and refills the weights that a graph would point to")
        return Decision(True, "")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [
            Site(name, group.path, (claim("capture", name), claim("capture", "")))
            for group in model.blocks()
            for name in group.names
        ]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        graphs = BlockGraphs(context.options.graph_warmup or 1)
        for site in sites:
            block = target.get_submodule(site.path)
            block.forward = graphs.wrap(block)
