"""torch's fused Adam kernels: one pass over memory, with the gradient's scale and the guard's verdict
inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vlaforge.runtime.optim.base import Bucket

CHUNK = 1 << 26
"""Elements whose gradients are widened to fp32 at a time: 256 MB beside a model of low-precision
gradients."""


class TorchFusedAdam:
    """`torch._fused_adamw_` or, with coupled decay, `torch._fused_adam_`; on the CPU and on CUDA."""

    fuses: frozenset[str] = frozenset()

    def __init__(self, decoupled: bool):
        self.decoupled = decoupled
        self.kernel: Callable[..., None] = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def __call__(self, bucket: Bucket) -> None:
        hyper = bucket.hyper
        refused, inverse = (~bucket.ok).to(torch.float32), 1.0 / bucket.scale
        rate = bucket.lr.to(torch.float32) if bucket.lr.is_cuda else bucket.lr
        for part in _chunks(bucket.weights, bucket.grads):
            weights = bucket.weights[part]
            grads = [g.to(w.dtype) for w, g in zip(weights, bucket.grads[part])]
            self.kernel(
                weights,
                grads,
                bucket.state["exp_avg"][part],
                bucket.state["exp_avg_sq"][part],
                [],
                [bucket.step] * len(weights),
                lr=rate,
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                weight_decay=bucket.weight_decay,
                eps=hyper.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=inverse,
                found_inf=refused,
            )


def _chunks(weights: list[Tensor], grads: list[Tensor]) -> Iterator[slice]:
    """Slices of the lists: everything when no gradient needs widening, else at most `CHUNK` elements each."""
    if all(w.dtype == g.dtype for w, g in zip(weights, grads)):
        yield slice(0, len(weights))
        return
    start, size = 0, 0
    for number, weight in enumerate(weights):
        if size and size + weight.numel() > CHUNK:
            yield slice(start, number)
            start, size = number, 0
        size += weight.numel()
    yield slice(start, len(weights))
