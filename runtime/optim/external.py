"""Adam by the fused kernels of Transformer Engine or NVIDIA Apex, over this package's own state.

Both libraries have the same multi-tensor kernels with everything on the device ("capturable"): rate, step
count, inverse scale and a flag that stops the update. Neither is needed unless asked for by name.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.runtime.optim.base import Bucket

BLOCK = 2048 * 32
"""Elements one thread block takes, as both libraries' own optimisers launch it."""


@dataclass(frozen=True)
class Library:
    """Where a library keeps the kernels, and how a person gets it."""

    name: str
    module: str
    install: str

    def load(self, optimizer: str) -> ModuleType:
        """The kernels' module. UserError says how to install it, or that it is another package of that
        name."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise UserError(
                f"--optimizer {optimizer} needs {self.name}, which is not installed: {self.install}"
            ) from error
        if not hasattr(module, "multi_tensor_adam_capturable"):
            raise UserError(f"--optimizer {optimizer}: '{self.module}' lacks the fused Adam kernels: {self.install}")
        return module


TRANSFORMER_ENGINE = Library(
    "Transformer Engine",
    "transformer_engine_torch",
    "pip install --no-build-isolation 'transformer-engine[pytorch]' on a machine with CUDA.",
)
APEX = Library(
    "NVIDIA Apex",
    "amp_C",
    "build it from source, github.com/NVIDIA/apex with --cpp_ext --cuda_ext (the PyPI package called "
    "'apex' is something else).",
)


class ExternalAdam:
    """One of the libraries' multi-tensor AdamW; rounds masters to the parameters in the same pass."""

    fuses = frozenset({"master"})

    def __init__(self, library: Library, optimizer: str):
        self.kernels = library.load(optimizer)
        self.name = optimizer

    def __call__(self, bucket: Bucket) -> None:
        self.check(bucket.weights[0].device)
        masters = bucket.params[0].dtype != bucket.weights[0].dtype
        first, second = bucket.state["exp_avg"], bucket.state["exp_avg_sq"]
        if masters:
            grads = [g.to(p.dtype) for g, p in zip(bucket.grads, bucket.params)]
            kernel = self.kernels.multi_tensor_adam_capturable_master
            lists = [grads, bucket.params, first, second, bucket.weights]
        else:
            kernel = self.kernels.multi_tensor_adam_capturable
            lists = [bucket.grads, bucket.weights, first, second]
        self._launch(kernel, lists, bucket)

    def check(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UserError(f"--optimizer {self.name} needs CUDA; take TorchFusedAdamW on '{device.type}'.")

    def _launch(self, kernel, lists: list[list[Tensor]], bucket: Bucket) -> None:
        hyper = bucket.hyper
        stop = (~bucket.ok).to(torch.int32).reshape(1)
        decoupled, correct_bias = 1, 1
        kernel(
            BLOCK,
            stop,
            lists,
            bucket.lr.to(torch.float32).reshape(1),
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            bucket.step.to(torch.int32).reshape(1),
            decoupled,
            correct_bias,
            bucket.weight_decay,
            bucket.scale.to(torch.float32).reshape(1),
        )
