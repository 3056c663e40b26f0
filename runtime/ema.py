"""A running average of the weights in fp32: average ← average + (1 - decay)(weight - average) after each
update.

It follows the fp32 masters where there are any, is saved with each checkpoint, and is what evaluation and
export use. Refused steps leave it as it is. Frozen parameters are their own average and need no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.runtime.optim.base import Leaf, Optimizer, as_sharded, average, for_leaf, local


class Ema:
    """The average of an optimiser's weights; attaches itself as `optimizer.ema`.

    Args:
        optimizer: whose weights to follow.
        decay: in [0, 1); 0.999 averages over about a thousand updates.
    """

    def __init__(self, optimizer: Optimizer, decay: float):
        if not 0.0 <= decay < 1.0:
            raise UserError(f"--ema-decay is {decay}: it must be at least 0 and below 1.")
        self.decay = decay
        self.leaves = optimizer.leaves
        self._shadow = {leaf.name: leaf.weight.detach().to(torch.float32, copy=True) for leaf in optimizer.leaves}
        optimizer.ema = self

    def reset(self) -> None:
        """Starts over from the present weights."""
        for leaf in self.leaves:
            self._shadow[leaf.name].copy_(leaf.weight)

    def shadow(self, leaf: Leaf) -> Tensor:
        """The average of one weight: fp32, this rank's shard."""
        return self._shadow[leaf.name]

    @torch.no_grad()
    def update(self, leaves: Sequence[Leaf], ok: Tensor) -> None:
        """Moves the averages of `leaves` towards their weights, or not at all when `ok` is False."""
        average([self._shadow[leaf.name] for leaf in leaves], [leaf.weight for leaf in leaves], self.decay, ok)

    def tensors(self) -> dict[str, Tensor]:
        """Average by parameter name, for a checkpoint."""
        return {leaf.name: as_sharded(self._shadow[leaf.name], leaf.param.data) for leaf in self.leaves}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `tensors` gave. UserError when a parameter is missing."""
        missing = [leaf.name for leaf in self.leaves if leaf.name not in tensors]
        if missing:
            raise UserError(f"The saved average lacks {len(missing)} parameters, the first is {missing[0]}.")
        for leaf in self.leaves:
            self._shadow[leaf.name].copy_(for_leaf(tensors[leaf.name], leaf))

    @contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """The model holds the averages inside the block, and its own weights again after it, bit for bit."""
        kept = [local(leaf.param.data).clone() for leaf in self.leaves]
        try:
            for leaf in self.leaves:
                local(leaf.param.data).copy_(self._shadow[leaf.name])
            yield
        finally:
            for leaf, value in zip(self.leaves, kept):
                local(leaf.param.data).copy_(value)
