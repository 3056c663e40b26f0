"""What every model is: a plain `nn.Module`, pure in its randomness, that states its batch and its repeated blocks.

Axes: B samples, H action horizon, A action dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.schema import Batch, Contract, Draw


@dataclass
class LossTerm:
    """A masked sum and how many elements it counts, both fp32 scalars on the device: their ratio is the mean."""

    sum: Tensor
    count: Tensor
    weight: float = 1.0


@dataclass
class Losses:
    """The loss of a batch as sums and counts, so that one masked mean holds over micro-batches and ranks.

    `details` are detached tensors for parity and logs (per-element losses, predictions); nothing trains on them.
    """

    terms: dict[str, LossTerm]
    details: dict[str, Tensor] = field(default_factory=dict)

    def total(self, counts: Mapping[str, Tensor] | None = None) -> Tensor:
        """Σ weight · sum / count, with `counts` (the global ones, see `EmbodiedModel.counts`) or this batch's own."""
        parts = [
            term.weight * term.sum / (counts[name] if counts is not None else term.count).clamp_min(1e-6)
            for name, term in self.terms.items()
        ]
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class BlockGroup:
    """Repeated blocks of one kind: the unit of compile, recompute, sharding and capture.

    `path` is the attribute path of the container (``"layers"``); `names` the blocks' own paths, in order of use.
    Blocks of a group have the same class and shapes, and are called through `forward` with positional tensors.
    """

    path: str
    names: tuple[str, ...]

    def modules(self, root: nn.Module) -> list[nn.Module]:
        return [root.get_submodule(name) for name in self.names]


class EmbodiedModel(nn.Module, ABC):
    """Base of all families.

    Subclasses set `family` (the folder's name), take the family's config in `__init__`, and never call an RNG in
    `loss` or `act`: noise and time arrive in `draw`.
    """

    family: str
    config: Any

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    @classmethod
    @abstractmethod
    def contract(cls, config: Any) -> Contract:
        """Names, shapes, dtypes, random inputs and trimmable axes of the batch, for `config`."""

    @abstractmethod
    def loss(self, batch: Batch, draw: Draw) -> Losses:
        """The training loss. Pure: the same batch and draw give the same result, on any rank."""

    def encode_frozen(self, batch: Batch) -> Batch:
        """The frozen start of a step: the batch with what frozen encoders read (pixels, token ids) replaced by what
        they make of it. It uses no trained weight, records no gradient, and returns an encoded batch as it is. `loss`
        and `act` call it themselves; the `overlap` pass calls it earlier, for the next batch, on its own stream.
        """
        return batch

    def frozen_networks(self, device: torch.device | str) -> dict[str, nn.Module]:
        """Networks beside the parameters that `encode_frozen` runs on `device`, by name. They take memory there, and no
        part in checkpoints, wrappers or the optimiser; on the meta device they are shapes, and no weights are read. A
        model that names some uses no weights of its own in `encode_frozen`."""
        return {}

    @abstractmethod
    def act(self, obs: Batch, draw: Draw, steps: int) -> Tensor:
        """Normalised actions [B, H, A]; `draw` holds the initial noise under the name that training uses."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Each loss term's count as a function of the batch alone (no forward): summed over ranks and micro-batches,
        it is the denominator that every rank uses."""

    @abstractmethod
    def blocks(self) -> list[BlockGroup]:
        """Repeated blocks in order of use; groups do not overlap."""

    def towers(self) -> dict[str, list[str]]:
        """Named parts (``vision``, ``language``, ``expert``, ...) → module paths, for freezing and rates by name."""
        return {}

    def keep_fp32(self) -> list[str]:
        """Path patterns (fnmatch) of modules whose weights stay fp32 when the rest is bf16."""
        return []

    def token_count(self, batch: Batch) -> int:
        """Sequence positions that `batch` puts through the repeated blocks, from its shapes alone, for rates in logs;
        0 where the family does not say."""
        return 0

    def forward(
        self,
        batch: Batch,
        draw: Draw,
        objective: Callable[[EmbodiedModel, Batch, Draw], Losses] | None = None,
    ) -> Losses:
        """`loss`, or `objective(self, batch, draw)`; wrappers (DDP, FSDP) hook `forward`, so the trainer calls the
        model, not the method."""
        return self.loss(batch, draw) if objective is None else objective(self, batch, draw)
