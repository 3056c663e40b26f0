"""Parameters that hold some rows of a canonical table, and where the other rows are.

A table by embodiment trains only in the rows that the data reads. `cut` leaves these as the parameter, under its old
name, and keeps the others beside it on the host: no parameter and no buffer, so neither the optimiser, a wrapper nor a
state dict sees them. `model.state_dict()` and `load_state_dict()` speak of the whole table (hooks); what else is kept
by parameter name goes through `whole` and `part`, by way of `graphs.packing`. What is sharded stays sharded there, and
all ranks call together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

ATTRIBUTE = "_forge_rows"

Outside = Literal["zeros", "weights", "masters"]
"""What the rows that do not train hold in a tensor by parameter name: zeros (a gradient, a moment), the weights (an
average), or the weights as exactly as they are known (a master)."""


@dataclass
class Rows:
    """A table's rows `used` (int64 [k]) are a parameter; the `others` (int64 [E - k]) hold `rest` [E - k, ...], in fp32
    where `precision` left a master. All are on the host; `rest` is on the meta device as long as the table was."""

    used: Tensor
    others: Tensor
    rest: Tensor

    def shape(self, value: Tensor) -> tuple[int, ...]:
        """Of the table of which `value` [k, ...] are the rows in use."""
        return len(self.used) + len(self.others), *value.shape[1:]

    def whole(self, value: Tensor, outside: Outside = "zeros") -> Tensor:
        """The table [E, ...] of which `value` [k, ...] are the rows in use; on the host, where the others are."""
        if isinstance(value, DTensor):
            return _sharded(self.whole(value.full_tensor(), outside), value)
        table = torch.zeros(self.shape(value), dtype=value.dtype, device="cpu")
        table[self.used] = value.cpu()
        if outside != "zeros":
            table[self.others] = self.rest.to(value.dtype)
        return table

    def part(self, name: str, table: Tensor, outside: Outside = "zeros") -> Tensor:
        """The rows in use of a `table` [E, ...]; the other rows of a master become the weights here.

        ValueError where the other rows hold what would be lost: a moment that is not zero, or an average that is not
        the weight itself: those embodiments were trained, or decayed.
        """
        if isinstance(table, DTensor):
            return _sharded(self.part(name, table.full_tensor(), outside), table)
        others = table[self.others.to(table.device)]
        if outside == "masters":
            self.rest = others.to("cpu", self.rest.dtype)
        elif not torch.equal(others, torch.zeros_like(others) if outside == "zeros" else self.rest.to(others)):
            raise ValueError(
                f"'{name}' has changed for embodiments that are not in the data; go on with --without embodiments"
            )
        return table[self.used.to(table.device)]


def _sharded(value: Tensor, like: DTensor) -> DTensor:
    """`value`, which every rank has whole, spread as `like` is; the rest of it is let go."""
    shard = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        shard.to_local().clone(), like.device_mesh, like.placements, run_check=False, shape=value.shape,
        stride=value.stride(),
    )  # fmt: skip


def cut(holder: nn.Module, name: str, used: Sequence[int]) -> None:
    """Leaves the rows `used` (ascending) of the parameter `name` of `holder` as the parameter; masters come along."""
    table = holder.get_parameter(name)
    master = getattr(table, "_master_fp32", None)
    others = sorted(set(range(table.shape[0])) - set(used))
    kept, left = (torch.tensor(rows, dtype=torch.int64, device="cpu") for rows in (used, others))
    part = nn.Parameter(table.data[kept], requires_grad=table.requires_grad)
    if master is not None:
        part._master_fp32 = master[kept]
    rest = (table.data if master is None else master)[left]
    rows = Rows(kept, left, rest if rest.is_meta else rest.cpu())
    setattr(holder, name, part)
    if ATTRIBUTE not in holder.__dict__:
        holder.__dict__[ATTRIBUTE] = {}
        holder._register_state_dict_hook(_whole_hook)
        holder.register_load_state_dict_pre_hook(_part_hook)
    holder.__dict__[ATTRIBUTE][name] = rows


def _whole_hook(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, rows in module.__dict__[ATTRIBUTE].items():
        if prefix + name in state:
            state[prefix + name] = rows.whole(state[prefix + name].detach(), "weights")


def _part_hook(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, rows in module.__dict__[ATTRIBUTE].items():
        table = state.get(prefix + name)
        # A table of another size is left for `load_state_dict` to name.
        if table is not None and len(table) == len(rows.used) + len(rows.others):
            state[prefix + name] = rows.part(name, table, "masters")


def cut_tables(model: nn.Module) -> dict[str, Rows]:
    """Full name of each parameter of `model` that holds some rows of its table → which."""
    return {
        f"{prefix}.{name}" if prefix else name: rows
        for prefix, module in model.named_modules()
        for name, rows in module.__dict__.get(ATTRIBUTE, {}).items()
    }
