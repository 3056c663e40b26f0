"""compile_blocks: each kind of repeated block compiled once (`fullgraph=True`), and the parts around them.

Regions are compiled, not the whole model: the time to compile does not grow with depth, wrappers can hook between
blocks, and a graph break is an error at the block that has it. Blocks of one kind share code; their weights are inputs
of it. Counting of graph breaks and recompiles is in `graphs.counters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim

CACHE_LIMIT = 64
"""Shapes and kinds that one function's code may be compiled for. torch's default of 8 is too few when all buckets of
`static_shapes` occur; beyond this it is an error rather than silent eager execution."""


class CompileBlocks(Pass):
    name = "compile_blocks"
    numerics = "reorder"
    order = 80

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        if options.compile == "off":
            return Decision(False, "compiling was switched off")
        if not (options.compiles or self.name in context.asked):
            return Decision(False, "compiling takes longer than it saves in a short CPU run (--compile)")
        if "trim_tokens" in context.on and "static_shapes" not in context.on and self._varies(context):
            return Decision(False, "lengths vary: each would be compiled anew (add static_shapes)")
        return Decision(True, "")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        found = [Site(name, group.path, (claim("call", name),)) for group in model.blocks() for name in group.names]
        return found + [Site(name, name, (claim("call", name),)) for name in _parts(model)]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, CACHE_LIMIT)
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, 4 * CACHE_LIMIT
        )
        for site in sites:
            owner, attribute = _method(target, site.path)
            compiled = torch.compile(getattr(owner, attribute), fullgraph=True, dynamic=False)
            setattr(owner, attribute, compiled)

    @staticmethod
    def _varies(context: Context) -> bool:
        return any(trim.keep == "prefix" for trim in context.contract.trims)


def _parts(model: nn.Module) -> list[str]:
    """Paths of modules and methods beside the blocks that the model says are worth compiling (`compiled_parts`)."""
    return list(model.compiled_parts()) if hasattr(model, "compiled_parts") else []


def _method(model: nn.Module, path: str) -> tuple[Any, str]:
    """Where the callable of a site lives: a module's `forward`, or a method named by the last part of the path."""
    owner: Any = model
    names = path.split(".") if path else []
    for number, name in enumerate(names):
        value = getattr(owner, name)
        if number == len(names) - 1 and not isinstance(value, nn.Module):
            return owner, name
        owner = value
    return owner, "forward"
