"""hoist: what does not depend on the layer is computed once.

A flow-matching time modulates every norm of an expert through a projection of its own: dozens of products with as many
rows as there are samples, each too small to fill a device. Cross-attention layers that read one context each project it
to keys and values. Models say where (`blocks.ahead`); the weights are put together, and one product before the first
layer serves all. Rotary tables and masks are made once by the models themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType

from torch import Tensor, nn

from vlaforge.graphs.packing import install, pack_parameters
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.models.blocks.ahead import Ahead, KeysValues, LayerConditions, LayerKeys

KINDS = {LayerConditions: "modulations", LayerKeys: "keys_values"}


class Modulations(nn.Module):
    """Stands in for `LayerConditions`: each modulated layer gets its own modulations instead of the condition."""

    def __init__(self, packed: nn.Linear, rows: Sequence[Sequence[int]]):
        super().__init__()
        self.packed, self.rows = packed, [sum(layer) for layer in rows]

    def forward(self, condition_BC: Tensor) -> list[Tensor]:
        """[B, C] → for each layer [B, the rows of its projections]."""
        return list(self.packed(condition_BC.to(self.packed.weight.dtype)).split(self.rows, dim=-1))


class AllKeys(nn.Module):
    """Stands in for `LayerKeys`: keys and values of all layers from one product."""

    def __init__(self, packed: nn.Linear, rows: Sequence[Sequence[int]]):
        super().__init__()
        self.packed, self.rows = packed, [count for layer in rows for count in layer]

    def forward(self, context_BMC: Tensor) -> list[KeysValues]:
        """[B, M, C] → for each layer (keys, values) [B, M, width]."""
        parts = self.packed(context_BMC.to(self.packed.weight.dtype)).split(self.rows, dim=-1)
        return list(zip(parts[::2], parts[1::2]))


class Rows(nn.Module):
    """Stands in for a projection whose product is made already: its rows of its layer's."""

    def __init__(self, packed: nn.Linear, first: int, count: int):
        super().__init__()
        self.rows = slice(first, first + count)
        self._packed = (packed,)  # no submodule: the weight belongs to the place where the product is made

    @property
    def weight(self) -> Tensor:
        """What stands in for the projection's weight when a layer asks for its dtype."""
        return self._packed[0].weight

    def forward(self, modulations_BM: Tensor) -> Tensor:
        return modulations_BM[:, self.rows]


def paths(place: str, module: Ahead) -> list[list[str]]:
    """Full paths of the projections of each layer."""
    parent = place.rpartition(".")[0]
    return [[f"{parent}.{name}" if parent else name for name in layer] for layer in module.projections]


def _places(model: nn.Module) -> Iterator[tuple[str, Ahead]]:
    for name, module in model.named_modules():
        if type(module) in KINDS and module.projections:
            yield name, module


def _hindrance(model: nn.Module, place: str, module: Ahead, context: Context) -> str:
    """Why the projections cannot be one; empty when they can."""
    names = [name for layer in paths(place, module) for name in layer]
    linear = [model.get_submodule(name) for name in names]
    if any(type(projection) is not nn.Linear for projection in linear):
        return "adapters are attached to the layers' projections"
    groups = {context.options.groups.get(f"{name}.weight") for name in names}
    if len({(p.weight.requires_grad, p.weight.dtype) for p in linear}) > 1 or len(groups) > 1:
        return "the layers' projections are trained differently"
    return ""


class Hoist(Pass):
    name = "hoist"
    numerics = "reorder"
    order = 50

    def decide(self, model: nn.Module, context: Context) -> Decision:
        places = list(_places(model))
        if not places:
            return Decision(False, "no work that all layers share is left inside of them")
        if context.options.sharded:
            return Decision(False, "one weight for all layers would not be sharded with them")
        left = [_hindrance(model, place, module, context) for place, module in places]
        if all(left):
            return Decision(False, left[0])
        count = sum(sum(map(len, module.projections)) for (_, module), reason in zip(places, left) if not reason)
        products = left.count("")
        return Decision(True, f"{count} projections of shared inputs in {products} product{'s' * (products > 1)}")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        found = []
        for place, module in _places(model):
            if not _hindrance(model, place, module, context):
                claims = tuple(claim("storage", name) for layer in paths(place, module) for name in layer)
                found.append(Site(place, KINDS[type(module)], claims))
        return found

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            hoist(target, site.path)


def hoist(model: nn.Module, place: str) -> None:
    """Puts the joint product in the place of the `Ahead` module there; the layers lose their projections."""
    module = model.get_submodule(place)
    layers = paths(place, module)
    names = [name for layer in layers for name in layer]
    linear = [model.get_submodule(name) for name in names]
    packed = nn.Linear(linear[0].in_features, sum(p.out_features for p in linear), device="meta")
    packed.weight = pack_parameters([p.weight for p in linear])
    packed.bias = None if linear[0].bias is None else pack_parameters([p.bias for p in linear])
    if "forward" in linear[0].__dict__:
        packed.forward = MethodType(linear[0].forward.__func__, packed)
    rows = [[model.get_submodule(name).out_features for name in layer] for layer in layers]
    for layer, counts in zip(layers, rows):
        for at, name in enumerate(layer):
            if isinstance(module, LayerConditions):
                model.set_submodule(name, Rows(packed, sum(counts[:at]), counts[at]))
            else:
                parent, _, leaf = name.rpartition(".")
                delattr(model.get_submodule(parent), leaf)
    stand_in = Modulations if isinstance(module, LayerConditions) else AllKeys
    model.set_submodule(place, stand_in(packed, rows))
    for leaf in ("weight", "bias") if packed.bias is not None else ("weight",):
        members = [(f"{name}.{leaf}", p.out_features) for name, p in zip(names, linear)]
        install(model, f"{place}.packed.{leaf}", members)
