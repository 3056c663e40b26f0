"""How one value a sample, frame or element (a time, a mask, a weight) spreads over x, without being repeated.

Such a tensor v for x [B, ...] is one of
    [B]                   one a sample
    [B, S]                S divides x's second axis: equal segments of it (frames, steps), or its elements
    x's own axes          with 1 where it repeats: [B, 1, F, 1, 1], [B, H, 1], [B, H, A]; the axes that are not 1
                          stand side by side

Then element i of a sample reads v[(i // inner) % S]: a kernel needs two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from vlaforge.kernels.compat import tl, triton


@dataclass(frozen=True)
class Values:
    """`count` values a sample, each for `inner` neighbouring elements; `view` broadcasts over x in plain torch."""

    flat: Tensor
    count: int
    inner: int
    view: Tensor


def values(v: Tensor, x: Tensor) -> Values:
    """`v` as it spreads over `x`; ValueError where it does not."""
    b, shape = x.shape[0], tuple(x.shape)
    if v.shape[0] == b and v.ndim <= 2 and v.ndim < x.ndim:
        count = 1 if v.ndim == 1 else v.shape[1]
        if count and shape[1] % count == 0:
            run = shape[1] // count
            view = v.reshape(b, count, *[1] * (x.ndim - 2))
            if 1 < count < shape[1]:
                view = view.repeat_interleave(run, dim=1)
            return Values(v, count, run * prod(shape[2:]), view)
    if v.ndim == x.ndim and v.shape[0] == b:
        axes = [i for i in range(1, x.ndim) if v.shape[i] != 1]
        whole = all(v.shape[i] == shape[i] for i in axes)
        if whole and axes == list(range(axes[0], axes[-1] + 1) if axes else []):
            last = axes[-1] if axes else x.ndim - 1
            count = prod(v.shape[1:])
            inner = prod(shape[last + 1 :]) if axes else prod(shape[1:])
            return Values(v, count, inner, v)
    raise ValueError(f"{list(v.shape)} does not spread over {list(shape)}: one value a sample, segment or element")


@triton.jit
def value_of(sample, element, count, inner):
    """Where the values of a sample's elements stand in the flat [B · count] values; int32 divisions, 64-bit sample."""
    return sample.to(tl.int64) * count + element // inner % count
