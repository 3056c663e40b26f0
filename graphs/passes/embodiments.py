"""embodiments: of weights by embodiment, only those of the data's embodiments train.

A table with one row an embodiment has room for dozens of robots, and a dataset shows one or two. The other rows'
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
from vlaforge.models.action.embodiment import ByEmbodiment

NOTHING = 2.0**-25
"""A share of an fp32 weight that, taken off, leaves the weight as it is: half a unit in the last place."""


def kept_row(self: ByEmbodiment, embodiment_B: Tensor) -> Tensor:
    """`ByEmbodiment.row` among the rows in use. UserError for another embodiment on a CPU; a GPU, which is not waited
    for, asserts that its row is outside of the table."""
    row_B = self.rows_E.index_select(0, embodiment_B)
    count = _embodiments(self)
    if row_B.device.type == "cpu" and not torch.compiler.is_compiling() and int(row_B.max()) >= count:
        asked = sorted(set(embodiment_B[row_B >= count].tolist()))
        raise UserError(
            f"The batch has embodiments {asked}, which the data did not have when the plan was made: give --without "
            "embodiments."
        )
    return row_B


class Embodiments(Pass):
    name = "embodiments"
    numerics = "reorder"
    order = 15

    def decide(self, model: nn.Module, context: Context) -> Decision:
        options = context.options
        tables = _tables(model, context)
        if not tables:
            return Decision(False, "no weights by embodiment train")
        if not options.embodiments:
            return Decision(False, "which embodiments the data has is not known")
        sliced = {name: module for name, module in tables.items() if _used(module, context)}
        if not sliced:
            return Decision(False, f"the data has all {len(options.embodiments)} embodiments")
        faded = _fading(sliced, context)
        if faded > NOTHING and self.name not in context.asked:
            return Decision(False, f"on request: --with {self.name} ends the weight decay of unused embodiments")
        module = next(iter(sliced.values()))
        sizes = {name: sum(m.get_parameter(leaf).numel() for leaf in m.tables) for name, m in sliced.items()}
        total = sum(sizes.values())
        left = sum(size // _embodiments(m) * len(_used(m, context)) for m, size in zip(sliced.values(), sizes.values()))
        reason = f"{len(_used(module, context))} of {_embodiments(module)} in use: {count_text(left)} of "
        reason += f"{count_text(total)} weights by embodiment train"
        if faded <= NOTHING:
            return Decision(True, reason)
        share = f"{faded:.0e} a step" if math.isfinite(faded) else "as much as the optimiser takes"
        return Decision(True, f"{reason}; the rest no longer decays ({share})", "approx")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [
            Site(name, "table", tuple(claim("storage", f"{name}.{leaf}") for leaf in module.tables))
            for name, module in _tables(model, context).items()
            if _used(module, context)
        ]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            module = target.get_submodule(site.path)
            slice_rows(module, _used(module, context))


def slice_rows(module: ByEmbodiment, used: Sequence[int]) -> None:
    """Leaves the rows `used` of the tables as parameters; `rows_E` says which row each embodiment has, and one behind
    the last where it has none."""
    rows_E = torch.full((_embodiments(module),), len(used), dtype=torch.int64)
    rows_E[torch.tensor(used)] = torch.arange(len(used))
    for leaf in module.tables:
        device = module.get_parameter(leaf).device
        # Weights without values yet (`--init-on-meta`) do not make a buffer without values.
        rows_E = rows_E if device.type == "meta" else rows_E.to(device)
        cut(module, leaf, used)
    module.register_buffer("rows_E", rows_E, persistent=False)
    module.row = MethodType(kept_row, module)


def _embodiments(module: ByEmbodiment) -> int:
    """How many rows the tables have."""
    return len(getattr(module, module.tables[0]))


def _tables(model: nn.Module, context: Context) -> dict[str, ByEmbodiment]:
    """Modules by path whose tables by embodiment all train."""
    frozen = frozen_names(model, context)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ByEmbodiment) and not any(f"{name}.{leaf}" in frozen for leaf in module.tables)
    }


def _used(module: ByEmbodiment, context: Context) -> list[int]:
    """The rows that the data reads, ascending; none where that is all of them, or unknown."""
    used = sorted(context.options.embodiments or ())
    inside = not used or 0 <= used[0] <= used[-1] < _embodiments(module)
    return used if inside and len(used) < _embodiments(module) else []


def _fading(modules: dict[str, ByEmbodiment], context: Context) -> float:
    """The largest share of a weight without a gradient that one update takes; infinite when that is not known."""
    options = context.options
    groups = {options.groups.get(f"{name}.{leaf}") for name, module in modules.items() for leaf in module.tables}
    return max(options.fading.get(group, math.inf) for group in groups)
