"""trim_tokens: padding and absent cameras leave the batch before they cost anything.

The contract says which axes may be cut without changing the result (`Contract.trims`). Collate cuts them on the CPU, so
the model, the copy to the device and the attention only see what is there. The loss stays the same up to the order of
sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site


class TrimTokens(Pass):
    name = "trim_tokens"
    numerics = "reorder"
    order = 30

    def decide(self, model: nn.Module, context: Context) -> Decision:
        trims = context.contract.trims
        if not trims:
            return Decision(False, "the batch has no axis that may be cut")
        words = []
        for trim in trims:
            kind = "absent entries" if trim.keep == "any" else "padding"
            words.append(f"{kind} of {trim.mask} ({', '.join(name for name, _ in trim.cut)})")
        return Decision(True, "leave the batch: " + "; ".join(words))

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return [Site(trim.mask, trim.keep) for trim in context.contract.trims]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        """Nothing to change in the model: `Plan.trims` hands the cuts to the loader's collate."""
