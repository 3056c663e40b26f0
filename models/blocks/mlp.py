"""Feed-forward blocks: gated (GeGLU, SwiGLU) and plain.

Axes: B samples, T tokens, D width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class GatedActivation(nn.Module):
    """act(gate) · up: GeGLU with ``gelu_tanh``, SwiGLU with ``silu``."""

    def __init__(self, activation: str):
        super().__init__()
        self.activation = activation
        self._act = ACTIVATIONS[activation]

    def forward(self, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        return self._act(gate_BTF) * up_BTF

    def extra_repr(self) -> str:
        return self.activation


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)).

    Args:
        activation: a name of `ACTIVATIONS`.
    """

    def __init__(self, width: int, hidden: int, activation: str = "gelu_tanh", bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.act = GatedActivation(activation)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


class MLP(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, width: int, hidden: int, activation: str = "gelu_tanh", bias: bool = True):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, width, bias=bias)
        self.activation = activation
        self._act = ACTIVATIONS[activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc2(self._act(self.fc1(x_BTD)))

    def extra_repr(self) -> str:
        return self.activation
