"""What all layers make of one input: places where a pass (`hoist`) may make it for all of them in one product.

Axes: B samples, C width of a condition or a context, M tokens of a context.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]


class Ahead(nn.Module):
    """`projections[i]`: paths of the linear layers that layer i applies to the input, seen from the module's parent."""

    def __init__(self, projections: Sequence[Sequence[str]]):
        super().__init__()
        self.projections = tuple(tuple(layer) for layer in projections)


class LayerConditions(Ahead):
    """The condition that each modulated layer gets: here the same tensor for all, and each layer projects it. The pass
    hands every layer its own rows of one product, and the layers' projections only choose among these."""

    def forward(self, condition_BC: Tensor) -> list[Tensor]:
        return [condition_BC] * len(self.projections)


class LayerKeys(Ahead):
    """Keys and values of cross-attention layers that read one context: `projections[i]` are layer i's two. Here each
    layer makes its own when it comes to it (None); with the pass they come from one product, [B, M, width] each."""

    def forward(self, context_BMC: Tensor) -> list[KeysValues | None]:
        return [None] * len(self.projections)
