"""compile_blocks: each kind of repeated block compiled once (`fullgraph=True`).

Blocks are compiled, not the whole model: the time to compile does not grow with depth, wrappers can hook between
blocks, and a graph break is an error at the block that has it. Blocks of one kind share code; their weights are inputs
of it. What stands around the blocks runs once a step and takes a few percent of it. Graph breaks and recompiles are
counted by `graphs.counters`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.graphs.passes.static_shapes import varying
from vlaforge.kernels.compiler import cpu_options

CACHE_LIMIT = 64
"""Shapes and kinds that one function's code may be compiled for. torch's default of 8 is too few when all buckets of
`static_shapes` occur; beyond this it is an error rather than silent eager execution."""


class CompileBlocks(Pass):
    name = "compile_blocks"
    numerics = "reorder"
    order = 80

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        if options.compile == "off" and self.name not in context.asked:
            return Decision(False, "on request: --compile")
        if not (options.compiles or self.name in context.asked):
            return Decision(False, "compiling takes longer than it saves in a short CPU run (--compile)")
        if "trim_tokens" in context.on and "static_shapes" not in context.on and varying(context.contract):
            return Decision(False, "lengths vary: each would be compiled anew (add static_shapes)")
        return Decision(True, "")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [Site(name, group.path, (claim("call", name),)) for group in model.blocks() for name in group.names]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, CACHE_LIMIT)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * CACHE_LIMIT)
        options = None if context.options.device_kind.cuda else cpu_options()
        for site in sites:
            block = target.get_submodule(site.path)
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, options=options)
