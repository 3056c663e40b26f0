"""What a step and a run need of the other ranks; this base class is a single process that is all of them.

`runtime.dist` has the process-group version. Code that uses ranks never asks which one it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from vlaforge.runtime.optim.base import Leaf


class Ranks:
    """All ranks of a run. Methods called inside a step do not wait for the device."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------- inside a step

    @property
    def loss_factor(self) -> float:
        """What the loss is multiplied by, so that the wrapper's reduction of gradients gives their plain sum:
        the number of ranks where it averages."""
        return 1.0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` over ranks, on the device."""
        return values

    def square_norms(self, squares: Tensor, leaves: Sequence[Leaf]) -> Tensor:
        """Squared gradient norms [N] of whole parameters, from those of this rank's shards of them."""
        return squares

    def syncing(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch: gradients are reduced in the last one only."""
        return nullcontext()

    # ------------------------------------------------------------------------------------- around a run

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        """The lowered `model` in the wrapper that the plan's strategy names (DDP, FSDP)."""
        return model

    def gathered(self, model: nn.Module) -> AbstractContextManager[None]:
        """Whole weights on this process inside the block, for what calls parts of the model; all ranks enter it."""
        return nullcontext()

    def tell(self, step: int) -> None:
        """Notes the step that this rank is in, for the others to know when one stalls."""

    def collected(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        """A checkpoint's tensors as whole ones; all ranks call it, the leading one gets them."""
        return groups

    def notes(self, parts: Any) -> list[str]:
        """Sentences for the log on how the work is shared."""
        return []

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return flag

    def agree(self, facts: dict[str, str]) -> None:
        """Raises UserError naming the first fact (parameter names, config hash, ...) that differs by rank."""

    def barrier(self) -> None:
        """Waits for all ranks."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value` (plain data), in order of rank, on every rank."""
        return [value]
