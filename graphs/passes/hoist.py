"""hoist: what does not depend on the layer is computed once.

A flow-matching time modulates every norm of an expert through a projection of its own: dozens of products with as many
rows as there are samples, each too small to fill a device. Their weights are put together and all modulations come from
one product before the first layer. Rotary tables and masks are made once by the models themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

from torch import Tensor, nn

from vlaforge.graphs.packing import install, pack_parameters
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.models.action.expert import LayerConditions
from vlaforge.models.blocks.norms import AdaRMSNorm


class Modulations(nn.Module):
    """Stands in for `LayerConditions`: each modulated layer gets its own modulations instead of the condition."""

    def __init__(self, packed: nn.Linear, rows: Sequence[int]):
        super().__init__()
        self.packed = packed
        self.rows = tuple(rows)

    def forward(self, condition_BC: Tensor) -> list[Tensor]:
        """[B, C] → for each layer [B, 3·D·(its norms)]."""
        return list(self.packed(condition_BC.to(self.packed.weight.dtype)).split(self.rows, dim=-1))


def _own_rows(self: AdaRMSNorm, modulations_BM: Tensor) -> Tensor:
    """`AdaRMSNorm.modulation` of a norm whose modulation is in its layer's already."""
    return modulations_BM[:, self.first_row : self.last_row]


def _norms_by_layer(model: nn.Module, count: int) -> list[list[str]] | None:
    """Paths of the modulated norms that read each of the `count` conditions: those of the blocks of one group, in
    order, and those outside of blocks for the last. None when the model is built otherwise."""
    norms = [name for name, module in model.named_modules() if type(module) is AdaRMSNorm]
    layers: list[list[str]] = []
    for group in model.blocks():
        inside = [[norm for norm in norms if norm.startswith(name + ".")] for name in group.names]
        if all(inside):
            layers += inside
    rest = [norm for norm in norms if not any(norm in layer for layer in layers)]
    if rest:
        layers.append(rest)
    return layers if len(layers) == count else None


class Hoist(Pass):
    name = "hoist"
    numerics = "reorder"
    order = 50

    def decide(self, model: nn.Module, context: Context) -> Decision:
        places = [module for module in model.modules() if type(module) is LayerConditions]
        if not places:
            return Decision(False, "no work that all layers share is left inside of them")
        if context.options.sharded:
            return Decision(False, "one weight for all layers would not be sharded with them")
        layers = _norms_by_layer(model, places[0].count)
        if len(places) > 1 or layers is None:
            return Decision(False, "which norm reads which condition cannot be told")
        dense = {name: model.get_submodule(name).dense for layer in layers for name in layer}
        if any(type(projection) is not nn.Linear for projection in dense.values()):
            return Decision(False, "adapters are attached to the norms' projections")
        groups = {context.options.groups.get(f"{name}.dense.weight") for name in dense}
        if len({(d.weight.requires_grad, d.weight.dtype) for d in dense.values()}) > 1 or len(groups) > 1:
            return Decision(False, "the norms' projections are trained differently")
        return Decision(True, f"modulations of {len(dense)} norms in one product")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        path = next(name for name, module in model.named_modules() if type(module) is LayerConditions)
        layers = _norms_by_layer(model, model.get_submodule(path).count) or []
        claims = tuple(claim("storage", f"{name}.dense") for layer in layers for name in layer)
        return [Site(path, "modulations", claims)]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            hoist_modulations(target, site.path)


def hoist_modulations(model: nn.Module, path: str) -> None:
    """Puts `Modulations` in the place of the `LayerConditions` at `path`; the norms lose their projections."""
    layers = _norms_by_layer(model, model.get_submodule(path).count)
    names = [name for layer in layers for name in layer]
    dense = [model.get_submodule(name).dense for name in names]
    packed = nn.Linear(dense[0].in_features, sum(d.out_features for d in dense), device="meta")
    packed.weight = pack_parameters([d.weight for d in dense])
    packed.bias = pack_parameters([d.bias for d in dense])
    if "forward" in dense[0].__dict__:
        packed.forward = MethodType(dense[0].forward.__func__, packed)
    rows = []
    for layer in layers:
        first = 0
        for name in layer:
            norm = model.get_submodule(name)
            norm.first_row, norm.last_row = first, first + norm.dense.out_features
            first = norm.last_row
            norm.modulation = MethodType(_own_rows, norm)
            del norm.dense
        rows.append(first)
    model.set_submodule(path, Modulations(packed, rows))
    for leaf in ("weight", "bias"):
        members = [(f"{name}.dense.{leaf}", d.out_features) for name, d in zip(names, dense)]
        install(model, f"{path}.packed.{leaf}", members)
