"""static_shapes: cut axes are rounded up to a few sizes, so that compiled code and CUDA graphs see shapes repeat.

Without it every new prompt length would be a new shape: a recompile each, and no whole-step graph.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.data.schema import Contract, Trim
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site

BUCKET, SIZES = 32, 8
"""Default multiple, and for axes no longer than it (camera slots), how many sizes there may be at most. At a length of
50 of 200 it wastes 14 tokens, about 2 % of a two-camera sequence, and gives at most seven shapes."""


def varying(contract: Contract) -> list[Trim]:
    """The trims whose axis takes any length, left or right padding; whole slots come in a handful of counts."""
    return [trim for trim in contract.trims if trim.keep != "any"]


def axis_size(contract: Contract, trim: Trim) -> int:
    """Full size of the trimmed axis."""
    return contract.fields[trim.mask].shape[0]


def buckets(contract: Contract, trim: Trim, multiple: int) -> list[int]:
    """The sizes that the axis can then have: multiples, and the full size."""
    full = axis_size(contract, trim)
    return sorted({min(size, full) for size in range(multiple, full + multiple, multiple)})


class StaticShapes(Pass):
    name = "static_shapes"
    numerics = "reorder"
    order = 40

    def decide(self, model: nn.Module, context: Context) -> Decision:
        if "trim_tokens" not in context.on:
            return Decision(False, "shapes repeat already: nothing is trimmed")
        trims = varying(context.contract)
        if not trims:
            return Decision(False, "shapes repeat already: only whole slots are dropped")
        wanted = self.name in context.asked or context.options.compiles or context.options.device_kind.cuda
        if not wanted:
            return Decision(False, "nothing needs repeating shapes (no compile, no CUDA graph)")
        words = []
        for trim in trims:
            sizes = buckets(context.contract, trim, self._multiple(context, trim))
            shown = ", ".join(map(str, sizes if len(sizes) < 5 else [*sizes[:3], f"… {sizes[-1]}"]))
            words.append(f"{trim.mask} in {len(sizes)} sizes ({shown})")
        return Decision(True, "; ".join(words))

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [Site(trim.mask, f"multiple {self._multiple(context, trim)}") for trim in varying(context.contract)]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        """Nothing to change in the model: `Plan.trims` carries the multiples to collate."""

    @staticmethod
    def _multiple(context: Context, trim: Trim) -> int:
        full = axis_size(context.contract, trim)
        own = BUCKET if full > BUCKET else -(-full // SIZES)
        return min(full, context.options.buckets or max(trim.multiple, own))
