"""embodiments: of weights by embodiment, only those of the data's embodiments train.

A layer with one matrix an embodiment has room for dozens of robots, and a dataset shows one or two. The other rows'
gradients are zeros, which are made, summed and walked over by the optimiser all the same. Here the rows in use become
the parameter; state dicts and optimiser state keep the whole table (`graphs.rows`).

The rows in use take the same steps as before. Of the others, whose moments are zero, AdamW would take lr · weight decay
a step: below 2^-25 of a weight that rounds to nothing in fp32, and the pass is on wherever it applies. Above, it
changes what those rows become, and has to be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MethodType

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.graphs.passes.freeze import frozen_names
from vlaforge.graphs.render import count_text
from vlaforge.graphs.rows import cut
from vlaforge.models.action.embodiment import EmbodimentLinear

NOTHING = 2.0**-25
"""A share of an fp32 weight that, taken off, leaves the weight as it is: half a unit in the last place."""
LEAVES = ("table", "offset")


def sliced_forward(self: EmbodimentLinear, x_BTI: Tensor, embodiment_B: Tensor) -> Tensor:
    """`EmbodimentLinear.forward` on the rows in use. UserError for another embodiment on a CPU; a GPU, which is not
    waited for, asserts that its row is outside of the table."""
    row_B = self.rows_E.index_select(0, embodiment_B)
    if row_B.device.type == "cpu" and not torch.compiler.is_compiling() and int(row_B.max()) >= len(self.table):
        asked = sorted(set(embodiment_B[row_B >= len(self.table)].tolist()))
        raise UserError(
            f"The batch has embodiments {asked}, which the data did not have when the plan was made: give --without "
            "embodiments."
        )
    return EmbodimentLinear.forward(self, x_BTI, row_B)


class Embodiments(Pass):
    name = "embodiments"
    numerics = "reorder"
    order = 15

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        tables = _tables(model, context)
        if not tables:
            return Decision(False, "no weights by embodiment train")
        if options.sharded:
            return Decision(False, "sharded weights keep their own storage")
        if options.adapters:
            return Decision(False, "adapters are kept by the names and shapes of whole weights")
        if not options.embodiments:
            return Decision(False, "which embodiments the data has is not known")
        sliced = {name: module for name, module in tables.items() if _used(module, context)}
        if not sliced:
            return Decision(False, f"the data has all {len(options.embodiments)} embodiments")
        faded = _fading(sliced, context)
        if faded > NOTHING and self.name not in context.asked:
            return Decision(False, f"on request: --with {self.name} ends the weight decay of unused embodiments")
        module = next(iter(sliced.values()))
        total = sum(p.numel() for m in sliced.values() for p in m.parameters())
        left = sum(p.numel() // len(p) * len(_used(m, context)) for m in sliced.values() for p in m.parameters())
        reason = f"{len(_used(module, context))} of {len(module.table)} in use: {count_text(left)} of "
        reason += f"{count_text(total)} weights by embodiment train"
        if faded <= NOTHING:
            return Decision(True, reason)
        share = f"{faded:.0e} a step" if math.isfinite(faded) else "as much as the optimiser takes"
        return Decision(True, f"{reason}; the rest no longer decays ({share})", "approx")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [
            Site(name, "table", (claim("forward", name), *(claim("storage", f"{name}.{leaf}") for leaf in LEAVES)))
            for name, module in _tables(model, context).items()
            if _used(module, context)
        ]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            module = target.get_submodule(site.path)
            slice_rows(module, _used(module, context))


def slice_rows(module: EmbodimentLinear, used: Sequence[int]) -> None:
    """Leaves the rows `used` of the weights as parameters; `rows_E` says which row each embodiment has, and one behind
    the last where it has none."""
    rows_E = torch.full((len(module.table),), len(used), dtype=torch.int64)
    rows_E[torch.tensor(used)] = torch.arange(len(used))
    module.register_buffer("rows_E", rows_E.to(module.table.device), persistent=False)
    for leaf in LEAVES:
        cut(module, leaf, used)
    module.forward = MethodType(sliced_forward, module)


def _tables(model: nn.Module, context: Context) -> dict[str, EmbodimentLinear]:
    """Layers by embodiment whose weights all train, by path."""
    frozen = frozen_names(model, context)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is EmbodimentLinear and not any(f"{name}.{leaf}" in frozen for leaf in LEAVES)
    }


def _used(module: EmbodimentLinear, context: Context) -> list[int]:
    """The rows that the data reads, ascending; none where that is all of them, or unknown."""
    used = sorted(context.options.embodiments or ())
    inside = not used or 0 <= used[0] <= used[-1] < len(module.table)
    return used if inside and len(used) < len(module.table) else []


def _fading(tables: dict[str, EmbodimentLinear], context: Context) -> float:
    """The largest share of a weight without a gradient that one update takes; infinite when that is not known."""
    options = context.options
    groups = {options.groups.get(f"{name}.{leaf}") for name in tables for leaf in LEAVES}
    return max(options.fading.get(group, math.inf) for group in groups)
