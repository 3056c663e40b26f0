"""The algorithms in plain torch, one parameter at a time: the specification that the fused executors are
held to.

    AdamW   w ← w(1 - lr·λ);  m ← lerp(m, g, 1-β₁);  v ← β₂v + (1-β₂)g²;  w ← w - lr/(1-β₁ᵗ) ·
    m/(√v/√(1-β₂ᵗ) + ε) Adam    the same with g ← g + λw instead of the first SGD     g ← g + λw;  b ← μb +
    g (μ > 0);  w ← w - lr·b

`torch.optim`'s definitions. Everything is computed and then chosen by `ok`, so a refused step costs the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlaforge.runtime.optim.base import Bucket


class PlainAdam:
    """Adam with decoupled (AdamW) or coupled weight decay."""

    fuses: frozenset[str] = frozenset()

    def __init__(self, decoupled: bool):
        self.decoupled = decoupled

    def __call__(self, bucket: Bucket) -> None:
        hyper, t = bucket.hyper, bucket.step.to(torch.float64)
        rate = bucket.lr / (1 - hyper.beta1**t)
        root = torch.sqrt(1 - hyper.beta2**t)
        moments = zip(bucket.state["exp_avg"], bucket.state["exp_avg_sq"])
        for w, g, (m, v) in zip(bucket.weights, bucket.grads, moments):
            g = g.to(w.dtype) * bucket.scale
            if not self.decoupled and bucket.weight_decay:
                g = g + bucket.weight_decay * w
            new_m = torch.lerp(m, g, 1 - hyper.beta1)
            new_v = torch.addcmul(v * hyper.beta2, g, g, value=1 - hyper.beta2)
            decayed = w * (1 - bucket.lr * bucket.weight_decay) if self.decoupled else w
            new_w = decayed - new_m / (new_v.sqrt() / root + hyper.eps) * rate
            _choose(bucket.ok, (w, new_w), (m, new_m), (v, new_v))


class PlainSGD:
    """Stochastic gradient descent with coupled weight decay and, when asked for, momentum."""

    fuses: frozenset[str] = frozenset()

    def __call__(self, bucket: Bucket) -> None:
        buffers = bucket.state.get("momentum", [None] * len(bucket.weights))
        for w, g, b in zip(bucket.weights, bucket.grads, buffers):
            g = g.to(w.dtype) * bucket.scale + bucket.weight_decay * w
            if b is None:
                _choose(bucket.ok, (w, w - bucket.lr * g))
            else:
                new_b = bucket.hyper.momentum * b + g
                _choose(bucket.ok, (w, w - bucket.lr * new_b), (b, new_b))


def _choose(ok: Tensor, *pairs: tuple[Tensor, Tensor]) -> None:
    for old, new in pairs:
        old.copy_(torch.where(ok, new.to(old.dtype), old))
