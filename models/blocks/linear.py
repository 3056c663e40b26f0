"""A product with a weight of one's own, behind an attribute, so that a pass can choose what multiplies."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Multiplying(nn.Module):
    """A module that calls ``self.product(x, weight, bias)`` for `F.linear`."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
