"""One optimiser step as a pure device function: micro-batches in, metrics out, no host sync between.

    counts      Σ over micro-batches, then ranks: the denominators of every loss term, before any forward
    loss        each micro-batch's masked sums over those counts: one global mean, whatever the split
    norm        global, and per parameter group
    verdict     finite, and no spike: decided on the device from global values, alike on all ranks
    update      clip factor / loss scale, schedule, optimiser, average; nothing at all if the verdict is no

The step counter, rates, counters and loss scale are device tensors, so the whole step can be captured into
a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlaforge.data.schema import Minibatch
from vlaforge.models.base import Losses
from vlaforge.runtime.guards import Guard, LossScale
from vlaforge.runtime.optim.base import Leaf, Optimizer
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.schedules import Schedule


class Objective(Protocol):
    """What is minimised (a step program, `runtime.programs`)."""

    def counts(self, model: nn.Module, minibatch: Minibatch) -> dict[str, Tensor]: ...

    def losses(self, model: nn.Module, minibatch: Minibatch) -> Losses: ...


class Step:
    """Forward, backward and update over the micro-batches of one optimiser step.

    Args:
        objective: gives counts and losses of a micro-batch.
        model: as it is called (wrapped or not).
        bare: the model itself, for what is computed without a forward.
        optimizer: over the trainable parameters of `bare`.
        schedule: gives each group's rate from the step counter.
        ranks: the other processes.
        guard: refuses bad steps.
        loss_scale: for float16.
        clip: largest gradient norm; 0 or less only measures it.
        timer: ``timer(name)`` is a context manager around a stage; None times nothing.
    """

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        bare: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        ranks: Ranks,
        guard: Guard,
        loss_scale: LossScale,
        clip: float = 1.0,
        timer: Any = None,
    ):
        self.objective, self.model, self.bare = objective, model, bare
        self.optimizer, self.schedule, self.ranks = optimizer, schedule, ranks
        self.guard, self.loss_scale, self.clip = guard, loss_scale, clip
        self.timer = timer
        device = optimizer.device
        self.iteration = torch.zeros((), dtype=torch.int64, device=device)
        self.own_loss = torch.zeros((), device=device)
        """Mean over this rank's own samples in the last step."""
        self._own_counts: dict[str, Tensor] = {}
        self.base_G = torch.tensor([g.lr for g in optimizer.groups], dtype=torch.float64, device=device)
        self.floor_G = torch.tensor([g.floor for g in optimizer.groups], dtype=torch.float64, device=device)

    def __call__(self, minibatches: Sequence[Minibatch]) -> dict[str, Tensor]:
        """Takes one step; returns 0-dim device tensors by metric name (see `metrics`)."""
        self.optimizer.zero_grad()
        counts = self._counts(minibatches)
        loss, terms = self._forward_backward(minibatches, counts)
        with self._stage("clip"):
            norm, norm_G = self._norms()
            ok = self.guard.judge(loss, norm, self.loss_scale.at_least())
        lr_G = self.schedule.lr(self.iteration, self.base_G, self.floor_G)
        with self._stage("optimizer"):
            self.optimizer.step(lr_G, self._factor(norm), ok)
        metrics = self._metrics(loss, terms, norm, norm_G, lr_G)
        self.loss_scale.update(torch.isfinite(norm))
        self.iteration.add_(1)
        return metrics

    def _counts(self, minibatches: Sequence[Minibatch]) -> dict[str, Tensor]:
        """Global count of each loss term."""
        totals: dict[str, Tensor] = {}
        for minibatch in minibatches:
            for name, count in self.objective.counts(self.bare, minibatch).items():
                totals[name] = totals[name] + count if name in totals else count
        names = sorted(totals)
        self._own_counts = {name: totals[name].to(torch.float32) for name in names}
        summed = self.ranks.sum(torch.stack([self._own_counts[name] for name in names]))
        return dict(zip(names, summed.unbind()))

    def _forward_backward(
        self, minibatches: Sequence[Minibatch], counts: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Leaves the gradients of the global loss; returns it and its terms' weighted means."""
        factor = self.loss_scale.scale * self.ranks.loss_factor
        parts: dict[str, Tensor] = {}
        for number, minibatch in enumerate(minibatches):
            with self.ranks.syncing(self.model, last=number == len(minibatches) - 1):
                with self._stage("forward"):
                    losses = self.objective.losses(self.model, minibatch)
                    loss = losses.total(counts)
                with self._stage("backward"):
                    (loss * factor).backward()
            for name, term in losses.terms.items():
                part = term.weight * term.sum.detach().to(torch.float32) / counts[name].clamp_min(1e-6)
                parts[name] = parts[name] + part if name in parts else part
        names = sorted(parts)
        own = [parts[name] * counts[name] / self._own_counts[name].clamp_min(1e-6) for name in names]
        self.own_loss = torch.stack(own).sum()
        terms = dict(zip(names, self.ranks.sum(torch.stack([parts[name] for name in names])).unbind()))
        return torch.stack(list(terms.values())).sum(), terms

    @torch.no_grad()
    def _norms(self) -> tuple[Tensor, Tensor]:
        """Norm of all gradients, and of each group's [G], without the loss scale."""
        active = self.optimizer.active()
        number = len(self.optimizer.groups)
        by_group: list[list[Leaf]] = [[] for _ in range(number)]
        for leaf in active:
            by_group[leaf.group].append(leaf)
        squares = []
        for leaves in by_group:
            if not leaves:
                squares.append(torch.zeros((), device=self.optimizer.device))
                continue
            squares.append(self.ranks.square_norms(self.optimizer.square_sums(leaves), leaves).sum())
        squares_G = torch.stack(squares)
        return squares_G.sum().sqrt() / self.loss_scale.scale, squares_G.sqrt() / self.loss_scale.scale

    def _factor(self, norm: Tensor) -> Tensor:
        """What the gradients are multiplied by: clipping over the loss scale."""
        inverse = 1.0 / self.loss_scale.scale
        if self.clip <= 0:
            return inverse
        return inverse * (self.clip / (norm + 1e-6)).clamp_max(1.0)

    def _metrics(
        self, loss: Tensor, terms: dict[str, Tensor], norm: Tensor, norm_G: Tensor, lr_G: Tensor
    ) -> dict[str, Tensor]:
        """``loss``, ``loss/<term>`` when there are several, ``grad_norm`` and ``lr`` (also per group when
        there are several), and the guard's running counts."""
        groups = [group.name for group in self.optimizer.groups]
        metrics = {"loss": loss, "grad_norm": norm, "lr": lr_G[-1]}
        if len(terms) > 1:
            metrics |= {f"loss/{name}": value for name, value in terms.items()}
        if len(groups) > 1:
            metrics |= {f"lr/{name}": value for name, value in zip(groups, lr_G.unbind())}
            metrics |= {f"grad_norm/{name}": value for name, value in zip(groups, norm_G.unbind())}
        metrics |= {name: value.clone() for name, value in self.guard.counters.items()}
        if self.loss_scale.enabled:
            metrics["loss_scale"] = self.loss_scale.scale.clone()
        return metrics

    def _stage(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.timer is None else self.timer(name)
