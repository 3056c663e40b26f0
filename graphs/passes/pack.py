"""pack: projections of one input become one matrix product (query, key and value; gate and up).

Fewer, larger products: the input is read once, and the backward sums one input gradient instead of two or three. The
state dict keeps the canonical names (`graphs.packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.graphs.packing import install, last_rows, pack_parameters
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.models.blocks.attention import QKV
from vlaforge.models.blocks.mlp import GatedMLP


class PackedLinear(nn.Linear):
    """Several linears of one input."""

    def forward(self, x: Tensor, last: int = 0) -> Tensor:
        """All outputs, or the `last` ones alone."""
        return F.linear(x, *last_rows(self, last))


def qkv_forward(self: QKV, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`QKV.forward` with one product."""
    keys, values = self.k_rows, self.v_rows
    rows = self.packed.out_features
    q, k, v = self.packed(x_BTD).split((rows - keys - values, keys, values), dim=-1)
    return self.heads(q), self.heads(k), self.heads(v)


def qkv_keys(self: QKV, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """`QKV.keys` with one product of the lower rows."""
    both = self.packed(x_BTD, self.k_rows + self.v_rows)
    k, v = both.split((self.k_rows, self.v_rows), dim=-1)
    return self.heads(k), self.heads(v)


def gated_forward(self: GatedMLP, x_BTD: Tensor) -> Tensor:
    """`GatedMLP.forward` with one product for gate and up."""
    both = self.packed(x_BTD)
    if "forward" in self.act.__dict__:  # a kernel that takes the halves as they lie, and writes one gradient
        return self.down_proj(self.act(both))
    gate, up = both.chunk(2, dim=-1)
    return self.down_proj(self.act(gate, up))


LEAVES = ("weight", "bias")


@dataclass(frozen=True)
class Packing:
    """How one block class is packed: the linears that become one, and what replaces which method."""

    what: str
    members: tuple[str, ...]
    methods: dict[str, Callable[..., Any]]


TABLE: dict[type[nn.Module], Packing] = {
    QKV: Packing("qkv", ("q_proj", "k_proj", "v_proj"), {"forward": qkv_forward, "keys": qkv_keys}),
    GatedMLP: Packing("gate_up", ("gate_proj", "up_proj"), {"forward": gated_forward}),
}


def _uniform(members: Mapping[str, nn.Module], groups: Mapping[str, str]) -> bool:
    """Plain linears that agree in dtype, in having a bias, in whether they train, and in their optimiser group."""
    if any(type(member) is not nn.Linear for member in members.values()):
        return False
    kinds = {
        (m.weight.dtype, m.weight.requires_grad, m.bias is None, *(groups.get(f"{path}.{leaf}") for leaf in LEAVES))
        for path, m in members.items()
    }
    return len(kinds) == 1


class Pack(Pass):
    name = "pack"
    numerics = "reorder"
    order = 25

    def decide(self, model: nn.Module, context: Context) -> Decision:
        if context.options.adapters:
            return Decision(False, "adapters are attached to single projections")
        if context.options.sharded:
            return Decision(False, "sharded weights keep their own storage")
        return Decision(True, "")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        found = []
        for name, module in model.named_modules():
            packing = TABLE.get(type(module))
            if packing is None:
                continue
            members = {f"{name}.{member}": getattr(module, member) for member in packing.members}
            if _uniform(members, context.options.groups):
                found.append(Site(name, packing.what, tuple(claim("storage", path) for path in members)))
        return found

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            pack_module(target.get_submodule(site.path))


def pack_module(module: nn.Module) -> None:
    """Packs one block of a class in `TABLE`, in place."""
    packing = TABLE[type(module)]
    members = [getattr(module, name) for name in packing.members]
    first = members[0]
    rows = [member.out_features for member in members]
    linear = PackedLinear(first.in_features, sum(rows), bias=False, device="meta")
    linear.weight = pack_parameters([member.weight for member in members])
    if first.bias is not None:
        linear.bias = pack_parameters([member.bias for member in members])
    if "forward" in first.__dict__:
        # An executor that another pass chose for the parts serves the whole.
        linear.forward = MethodType(first.forward.__func__, linear)
    if isinstance(module, QKV):
        module.k_rows, module.v_rows = rows[1], rows[2]
    for name in packing.members:
        delattr(module, name)
    module.packed = linear
    for leaf in LEAVES if first.bias is not None else LEAVES[:1]:
        install(module, f"packed.{leaf}", [(f"{m}.{leaf}", count) for m, count in zip(packing.members, rows)])
    for name, function in packing.methods.items():
        setattr(module, name, MethodType(function, module))
