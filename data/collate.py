"""Fields of single samples → a batch, without what no sample of it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vlaforge.data.schema import Batch, Contract, Trim


def collate(samples: Sequence[Mapping[str, np.ndarray]], contract: Contract, trim: bool = True) -> Batch:
    """Stacks the contract's fields of B samples and cuts them by its trims.

    ValueError when a sample lacks a field, or one has another shape or dtype than the contract says.
    """
    batch = Batch()
    for name in contract.fields:
        try:
            stacked = np.stack([sample[name] for sample in samples])
        except KeyError:
            held = sorted(set.intersection(*(set(sample) for sample in samples)))
            raise ValueError(
                f"the processing gives no '{name}', which the contract names; it gives {held}"
            ) from None
        batch[name] = torch.from_numpy(stacked)
        if batch[name].dtype != contract.fields[name].dtype:
            raise ValueError(
                f"'{name}' is {batch[name].dtype}, but the contract says {contract.fields[name].dtype}"
            )
    contract.check(batch)
    return trimmed(batch, contract.trims) if trim else batch


def trimmed(batch: Batch, trims: Sequence[Trim]) -> Batch:
    """Cuts each trim's axes where its mask is False in all samples; the rest of the batch is the same
    tensors.
    """
    out = Batch(batch)
    for rule in trims:
        kept = _kept(batch[rule.mask].any(0), rule)
        if kept is None:
            continue
        for name, axis in rule.cut:
            out[name] = out[name].index_select(axis, kept)
    return out


def _kept(used: torch.Tensor, rule: Trim) -> torch.Tensor | None:
    """Indices that stay along the axis (at least one), or None when all do."""
    count = len(used)
    held = torch.nonzero(used)[:, 0]
    if rule.keep in ("prefix", "suffix"):
        length = 1
        if len(held):
            length = int(held[-1]) + 1 if rule.keep == "prefix" else count - int(held[0])
        length = min(count, -(-length // rule.multiple) * rule.multiple)
        held = torch.arange(length) if rule.keep == "prefix" else torch.arange(count - length, count)
    elif not len(held):
        held = torch.zeros(1, dtype=torch.int64)
    return None if len(held) == count else held
