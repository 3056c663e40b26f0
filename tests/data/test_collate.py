"""Trimming: what is cut was masked in every sample, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlaforge.data.collate import collate, trimmed
from vlaforge.data.schema import Contract, Field, Trim


def contract(keep: str, multiple: int = 1, cut_mask: bool = True) -> Contract:
    fields = {
        "tokens": Field((6,), torch.int64, "L"),
        "mask": Field((6,), torch.bool, "L"),
        "pair": Field((2, 6), torch.float32, "PL"),
        "other": Field((3,), torch.float32, "D"),
    }
    cut = (("tokens", 1), ("pair", 2), *([("mask", 1)] if cut_mask else []))
    return Contract(fields, {}, (Trim("mask", cut, keep, multiple),))


def sample(mask) -> dict[str, np.ndarray]:
    return {
        "tokens": np.arange(6),
        "mask": np.array(mask),
        "pair": np.arange(12, dtype=np.float32).reshape(2, 6),
        "other": np.ones(3, np.float32),
    }


masks = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4)


@given(masks, st.sampled_from(["prefix", "suffix", "any"]), st.integers(1, 4), st.booleans())
def test_only_entries_that_no_sample_uses_are_cut(rows, keep, multiple, cut_mask):
    rules = contract(keep, multiple, cut_mask)
    samples = [sample(row) for row in rows]
    whole, cut = collate(samples, rules, trim=False), collate(samples, rules)
    used = np.array(rows).any(0)
    kept = cut["tokens"][0].tolist()  # the tokens are their own positions
    assert set(np.flatnonzero(used)) <= set(kept) and kept == sorted(kept) and kept
    if keep == "any":
        assert kept == (np.flatnonzero(used).tolist() or [0])
    else:
        assert len(kept) % multiple == 0 or len(kept) == 6
        assert kept[0] == 0 if keep == "prefix" else kept[-1] == 5
        needed = 1 + (
            max(np.flatnonzero(used), default=0) if keep == "prefix" else 5 - min(np.flatnonzero(used), default=5)
        )
        assert len(kept) < needed + multiple
    assert torch.equal(cut["pair"], whole["pair"][:, :, kept]) and torch.equal(cut["other"], whole["other"])
    assert torch.equal(cut["mask"], whole["mask"][:, kept] if cut_mask else whole["mask"])
    later = trimmed(whole, rules.trims)
    assert all(torch.equal(later[name], cut[name]) and cut[name].is_contiguous() for name in cut)


def test_faults_name_the_field():
    good = sample([True] * 6)
    for change, message in (
        ({"other": np.ones(3)}, r"'other' is torch\.float64"),
        ({"other": np.ones(4, np.float32)}, "'other' has shape"),
        ({"pair": np.ones(6, np.float32)}, "'pair' has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            collate([{**good, **change}], contract("any"))
    with pytest.raises(ValueError, match=r"'other' has samples of shapes \[3\] and \[4\]"):
        collate([good, {**good, "other": np.ones(4, np.float32)}], contract("any"))
    with pytest.raises(ValueError, match=r"no 'other'.*\['mask', 'pair', 'tokens'\]"):
        collate([{k: v for k, v in good.items() if k != "other"}], contract("prefix"))
