"""Fields of single samples → a batch, without what no sample of it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from vlaforge.data.schema import Batch, Contract, Field, Trim

Cut = tuple[int, slice | np.ndarray]
"""(axis, counting the batch axis as 0, and what stays along it)."""


def collate(samples: Sequence[Mapping[str, np.ndarray]], contract: Contract, trim: bool = True) -> Batch:
    """Stacks the contract's fields of B samples, cut by its trims (before they are copied, not after).

    ValueError when a sample lacks a field, or one has another shape or dtype than the contract says.
    """
    extra = {name: spec for name, spec in contract.optional.items() if any(name in sample for sample in samples)}
    cuts: dict[str, list[Cut]] = {}
    if trim:
        masks = {rule.mask: torch.from_numpy(_stack(samples, rule.mask)) for rule in contract.trims}
        cuts = _cuts(masks, [_widened(rule, contract, extra) for rule in contract.trims])
    batch = Batch()
    for name, spec in {**contract.fields, **extra}.items():
        batch[name] = torch.from_numpy(_stack(samples, name, cuts.get(name, ())))
        if batch[name].dtype != spec.dtype:
            raise ValueError(f"'{name}' is {batch[name].dtype}, but the contract says {spec.dtype}")
    contract.check(batch)
    return batch


def trimmed(batch: Batch, trims: Sequence[Trim]) -> Batch:
    """Cuts each trim's axes where its mask is False in all samples; the rest of the batch is the same tensors."""
    out = Batch(batch)
    for name, cuts in _cuts(batch, trims).items():
        for cut in cuts:
            out[name] = out[name][_index(*cut)].contiguous()
    return out


def _widened(rule: Trim, contract: Contract, extra: Mapping[str, Field]) -> Trim:
    """The rule, which also cuts the optional fields' axes of the same letters."""
    letters = {contract.fields[name].axes[axis - 1] for name, axis in rule.cut}
    more = [(name, spec.axes.index(c) + 1) for name, spec in extra.items() for c in letters if c in spec.axes]
    return replace(rule, cut=(*rule.cut, *more))


def _stack(samples: Sequence[Mapping[str, np.ndarray]], name: str, cuts: Sequence[Cut] = ()) -> np.ndarray:
    try:
        parts = [np.asarray(sample[name]) for sample in samples]
    except KeyError:
        held = sorted(set.intersection(*(set(sample) for sample in samples)))
        raise ValueError(f"the processing gives no '{name}', which the contract names; it gives {held}") from None
    for axis, kept in cuts:
        parts = [part[_index(axis - 1, kept)] for part in parts]
    if len(shapes := {part.shape for part in parts}) > 1:
        listed = " and ".join(str(list(shape)) for shape in sorted(shapes)[:3])
        raise ValueError(f"'{name}' has samples of shapes {listed}, which make no batch")
    return np.ascontiguousarray(np.stack(parts))


def _index(axis: int, kept: slice | np.ndarray) -> tuple:
    return (*[slice(None)] * axis, kept)


def _cuts(masks: Mapping[str, torch.Tensor], trims: Sequence[Trim]) -> dict[str, list[Cut]]:
    """Field → its cuts; fields that keep everything are left out."""
    cuts: dict[str, list[Cut]] = {}
    for rule in trims:
        kept = _kept(masks[rule.mask].any(0).cpu().numpy(), rule)
        if kept is not None:
            for name, axis in rule.cut:
                cuts.setdefault(name, []).append((axis, kept))
    return cuts


def _kept(used: np.ndarray, rule: Trim) -> slice | np.ndarray | None:
    """What stays along the axis (at least one entry), or None when all does."""
    count, held = len(used), np.flatnonzero(used)
    if rule.keep == "any":
        first, last = (int(held[0]), int(held[-1])) if len(held) else (0, 0)
        if len(held) in (0, last - first + 1):
            return None if max(len(held), 1) == count else slice(first, last + 1)
        return held
    length = 1
    if len(held):
        length = int(held[-1]) + 1 if rule.keep == "prefix" else count - int(held[0])
    length = min(count, -(-length // rule.multiple) * rule.multiple)
    if length == count:
        return None
    return slice(0, length) if rule.keep == "prefix" else slice(count - length, count)
