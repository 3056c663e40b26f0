"""The loss on held-out episodes: the same samples, noise and times each time, and no augmentation."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from vlaforge.runtime.assemble import Parts, to_device
from vlaforge.runtime.programs import stream
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.setup import Setup

MAX_BATCHES = 32
"""Micro-batches looked at in one evaluation."""


@torch.no_grad()
def held_out_loss(setup: Setup, parts: Parts, ranks: Ranks) -> dict[str, float]:
    """``eval_loss``: the masked global mean over (at most `MAX_BATCHES` micro-batches of) the held-out
    episodes.

    Empty without held-out episodes. The model's mode is restored.
    """
    if setup.held_out is None:
        return {}
    loader = stream(
        setup, parts.contract, ranks, dataset=setup.held_out, accumulate=1, shuffle=False, epochs=1,
        num_workers=0, training=False,
    )  # fmt: skip
    was_training = parts.model.training
    parts.model.eval()
    sums: dict[str, Tensor] = {}
    try:
        with torch.compiler.set_stance("force_eager"), loader:
            for minibatch in islice(to_device(loader, setup.device), _batches(setup, ranks)):
                for name, term in parts.program.losses(parts.wrapped, minibatch).terms.items():
                    pair = torch.stack([term.weight * term.sum.float(), term.count.float()])
                    sums[name] = sums[name] + pair if name in sums else pair
    finally:
        parts.model.train(was_training)
    if not sums:
        return {}
    names = sorted(sums)
    total = ranks.sum(torch.stack([sums[name] for name in names]))
    return {"eval_loss": float((total[:, 0] / total[:, 1].clamp_min(1e-6)).sum())}


def _batches(setup: Setup, ranks: Ranks) -> int:
    """How many micro-batches every rank gets: the last short one counts if it has a sample for each."""
    together = setup.args.per_device_batch_size * ranks.world
    full, rest = divmod(len(setup.held_out), together)
    return min(MAX_BATCHES, full + (rest >= ranks.world))
