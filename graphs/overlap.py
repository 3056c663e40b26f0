"""The next batch's way to the device, and what frozen encoders make of it, hidden behind the running step.

    for minibatch in Prefetcher(loader, device, model): ...

A step returns to the host as soon as it is launched, so when the trainer asks for the next batch, the device is still
busy with this one. The host batch (pinned by the loader, or here) is then copied on a stream of its own, and the
model's frozen start (`EmbodiedModel.encode_frozen`) runs on it there; the step's stream only waits for that. Nothing is
taken from the loader before it is asked for, so its cursor stays true and a run resumes where it was. Gradient
reduction under the backward is the wrapper's own. On a CPU the same code runs without streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.schema import Batch, Minibatch
from vlaforge.graphs.passes.base import Context
from vlaforge.graphs.passes.freeze import frozen_names


class _Reading(Exception):
    """A probe batch was read."""


class _Probe(Batch):
    """Holds nothing, and says when someone looks for a field in it."""

    def __missing__(self, name: str) -> Tensor:
        raise _Reading(name)


def frozen_encoders(model: nn.Module, context: Context) -> list[str]:
    """``["encode_frozen"]`` when the model's frozen start does something, with what will be frozen; else nothing.

    Sharded weights are left alone: outside of the wrapped forward nobody has gathered them. Encoders that stand beside
    the model are whole on every rank.
    """
    encode = getattr(model, "encode_frozen", None)
    if encode is None or (context.options.sharded and not model.frozen_networks("meta")):
        return []
    frozen = frozen_names(model, context)
    training = [p for name, p in model.named_parameters() if name in frozen and p.requires_grad]
    probe = _Probe()
    try:
        for parameter in training:
            parameter.requires_grad_(False)
        return [] if encode(probe) is probe else ["encode_frozen"]
    except _Reading:
        return ["encode_frozen"]
    finally:
        for parameter in training:
            parameter.requires_grad_(True)


class Prefetcher:
    """Iterates `loader` with its batches on `device`.

    Args:
        loader: iterable of host `Minibatch`es. Attributes that are not found here are looked up on it.
        device: where the step runs.
        model: for its `encode_frozen`; wrappers are looked through.
        encoders: what `frozen_encoders` gave; empty means that only the copy is hidden.
    """

    def __init__(
        self,
        loader: Iterable[Minibatch],
        device: torch.device | str,
        model: nn.Module | None = None,
        encoders: Iterable[str] = (),
    ):
        self.loader = loader
        self.device = torch.device(device)
        self._encode = getattr(_unwrap(model), "encode_frozen", None) if model is not None and tuple(encoders) else None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Minibatch]:
        for minibatch in self.loader:
            yield self._arrive(minibatch)

    def _arrive(self, minibatch: Minibatch) -> Minibatch:
        if self._stream is None:
            return self._encoded(minibatch.to(self.device))
        if not all(value.is_pinned() for value in (*minibatch.batch.values(), *minibatch.draw.values())):
            minibatch = minibatch.pin_memory()
        with torch.cuda.stream(self._stream):
            there = self._encoded(minibatch.to(self.device, non_blocking=True))
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for fields in (there.batch, there.draw):
            for value in fields.values():
                # The allocator must not hand this memory to the side stream while the step still reads it.
                value.record_stream(current)
        return there

    def _encoded(self, minibatch: Minibatch) -> Minibatch:
        if self._encode is None:
            return minibatch
        with torch.no_grad():
            return replace(minibatch, batch=self._encode(minibatch.batch))


def _unwrap(model: nn.Module) -> nn.Module:
    return getattr(model, "module", model)
