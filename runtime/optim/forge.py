"""ForgeAdamW: the update, the rounding of masters and the running average in one pass over memory.

On CUDA `kernels.adamw` does all of it in one launch a bucket, and `square_sums` reads the gradients once for their
norm. On a CPU `kernels.native` does the same where it can be compiled and takes the tensors (fp32 and bf16, one layout
in memory); else torch's own fused kernel does the update, with passes of their own for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlaforge.graphs.native import native
from vlaforge.kernels.adamw import adamw
from vlaforge.kernels.native import fits, readable
from vlaforge.kernels.square_sums import square_sums
from vlaforge.runtime.optim.base import Bucket, average
from vlaforge.runtime.optim.fused import TorchFusedAdam


class ForgeAdam:
    """AdamW by the best kernel of the device that the weights are on."""

    devices = ("cuda",)
    """Where the multi-tensor kernel runs."""

    fuses = frozenset({"master", "ema"})

    def __init__(self) -> None:
        self.decoupled = True
        self.elsewhere = TorchFusedAdam(decoupled=True)

    def __call__(self, bucket: Bucket) -> None:
        if bucket.weights[0].device.type in self.devices:
            adamw(**_tensors(bucket), **_constants(bucket))
        elif not self._native(bucket):
            self.elsewhere(bucket)
            if _has_masters(bucket):
                torch._foreach_copy_(bucket.params, bucket.weights)
            if bucket.ema is not None:
                average(bucket.ema, bucket.weights, bucket.ema_decay, bucket.ok)

    def _native(self, bucket: Bucket) -> bool:
        """The update on a CPU in one pass; False when it is not to be had for these tensors."""
        if bucket.weights[0].device.type != "cpu" or native() is None:
            return False
        tensors = _tensors(bucket)
        # A gradient may be laid out otherwise than its weight, as a product of transposed factors leaves it.
        tensors["grads"] = [
            g if g.stride() == w.stride() else torch.empty_like(w, dtype=g.dtype).copy_(g)
            for w, g in zip(bucket.weights, bucket.grads)
        ]
        rows = [part or bucket.weights for part in tensors.values()]
        if not all(fits(*row) for row in zip(*rows)):
            return False
        native().adamw(**tensors, **_constants(bucket))
        return True

    def square_sums(self, grads: Sequence[Tensor]) -> Tensor:
        """Σ g² of each gradient, fp32 [n], in one pass."""
        if all(readable(g) for g in grads) and native() is not None:
            return native().square_sums(grads)
        return square_sums(grads)


def _has_masters(bucket: Bucket) -> bool:
    return bucket.params[0].dtype != bucket.weights[0].dtype


def _tensors(bucket: Bucket) -> dict[str, list[Tensor]]:
    """The lists of both kernels, in the order of their arguments."""
    return {
        "weights": bucket.weights,
        "grads": bucket.grads,
        "exp_avgs": bucket.state["exp_avg"],
        "exp_avg_sqs": bucket.state["exp_avg_sq"],
        "params": bucket.params if _has_masters(bucket) else [],
        "ema": bucket.ema or [],
    }


def _constants(bucket: Bucket) -> dict[str, Tensor | float]:
    hyper = bucket.hyper
    return {
        "lr": bucket.lr,
        "step": bucket.step,
        "scale": bucket.scale,
        "ok": bucket.ok,
        "beta1": hyper.beta1,
        "beta2": hyper.beta2,
        "eps": hyper.eps,
        "weight_decay": bucket.weight_decay,
        "ema_decay": bucket.ema_decay,
    }
