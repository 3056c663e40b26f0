"""flex_attention: masks that SDPA takes only as a bool for each (query, key) go to FlexAttention, which reads their
structure: causal with padding, and segments.

On request until its gain has been measured on a GPU: policies' sequences are short, and SDPA's kernels are good.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.models.blocks.attention import Attention
from vlaforge.models.blocks.executors import flex_attention


def attention_sites(model: nn.Module, aspect: str) -> list[Site]:
    """Every attention of the model, claimed for one kind of its calls."""
    names = [name for name, module in model.named_modules() if type(module) is Attention]
    return [Site(name, "attention", (claim(aspect, name),)) for name in names]


class FlexAttention(Pass):
    name = "flex_attention"
    numerics = "reorder"
    order = 22
    default = False

    def decide(self, model: nn.Module, context: Context) -> Decision:
        if not context.options.device_kind.cuda:
            return Decision(False, "needs a CUDA device: elsewhere it has no backward")
        sites = attention_sites(model, "structured")
        return Decision(True, f"{self.describe(sites)}: calls that are causal with padding, or in segments")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return attention_sites(model, "structured")

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            target.get_submodule(site.path).structured = flex_attention
