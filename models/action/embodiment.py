"""Weights that depend on the sample's embodiment (robot, domain): tables with one row a number.

Used by GR00T (``CategorySpecificLinear``) and X-VLA (``DomainAwareLinear``): y = x @ W[e] + b[e].

Axes: B samples, T tokens, I inputs, O outputs, E embodiments.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ByEmbodiment(nn.Module):
    """A module with parameters by embodiment, `tables` [E, ...], which it reads at `row(embodiment_B)` alone."""

    tables: ClassVar[tuple[str, ...]]

    def row(self, embodiment_B: Tensor) -> Tensor:
        """int64 [B]: where each sample's embodiment stands in the tables. What keeps some rows alone puts another
        function in this one's place."""
        return embodiment_B


class EmbodimentLinear(ByEmbodiment):
    """y_BTO = x_BTI @ table[e_B] + offset[e_B].

    Named apart from a Linear's weight and bias: every embodiment has its own, and published recipes decay both.

    Args:
        embodiments: E, how many there are.
        inputs, outputs: I and O.
    """

    tables = ("table", "offset")

    def __init__(self, embodiments: int, inputs: int, outputs: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(embodiments, inputs, outputs))
        self.offset = nn.Parameter(torch.zeros(embodiments, outputs))
        bound = math.sqrt(6.0 / (inputs + outputs))
        nn.init.uniform_(self.table, -bound, bound)

    def forward(self, x_BTI: Tensor, embodiment_B: Tensor) -> Tensor:
        """x [B, T, I] and int64 [B] → [B, T, O]."""
        row_B = self.row(embodiment_B)
        table_BIO = self.table.index_select(0, row_B)
        offset_BO = self.offset.index_select(0, row_B)
        return self.multiply(x_BTI, table_BIO, offset_BO)

    def multiply(self, x_BTI: Tensor, table_BIO: Tensor, offset_BO: Tensor) -> Tensor:
        return torch.baddbmm(offset_BO[:, None], x_BTI, table_BIO)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.table.shape))


class EmbodimentMLP(nn.Module):
    """Two EmbodimentLinear layers with ReLU between (GR00T's ``CategorySpecificMLP``)."""

    def __init__(self, embodiments: int, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.layer1 = EmbodimentLinear(embodiments, inputs, hidden)
        self.layer2 = EmbodimentLinear(embodiments, hidden, outputs)

    def forward(self, x_BTI: Tensor, embodiment_B: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x_BTI, embodiment_B)), embodiment_B)
