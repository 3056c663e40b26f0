"""A step in a CUDA graph: static inputs by shape, real warm-up steps, one private pool, no update lost or added.

    step = CapturedStep(step, device)      called like the step it wraps
    scalars = step(minibatches)

A step is a function of its minibatches (batch and draw) and of state that lives on the device (weights, optimiser,
step count, learning rate): it draws no random numbers and reads nothing back. For each combination of input shapes the
first `warmup` calls run eagerly on a side stream, on the static buffers: they are true training steps. The next call
records the graph (recording runs nothing) and replays it; all later ones copy their inputs in and replay.

On a CPU the same path runs without streams: buffers are filled and the step is called on them, so that everything but
the recording itself is exercised there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from vlaforge.data.schema import Batch, Minibatch

MAX_GRAPHS = 16
"""Graphs kept at a time. Buckets give a handful; more means that shapes do not repeat, and the oldest is dropped."""

Key = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class CaptureError(RuntimeError):
    """The step cannot be recorded; the text says why and what to do."""


def shape_key(minibatches: Sequence[Minibatch]) -> Key:
    """Names, shapes and dtypes of every input: what must be equal for a graph to be replayed."""
    return tuple(
        (f"{number}{minibatch.stream}.{name}", tuple(value.shape), value.dtype)
        for number, minibatch in enumerate(minibatches)
        for fields in (minibatch.batch, minibatch.draw)
        for name, value in fields.items()
    )


@dataclass
class StaticInputs:
    """Buffers that a graph reads; `fill` copies a step's inputs into them on the current stream."""

    minibatches: list[Minibatch]

    @classmethod
    def like(cls, minibatches: Sequence[Minibatch], device: torch.device | str) -> StaticInputs:
        def empty(fields: Batch) -> Any:
            return type(fields)({name: torch.empty_like(value, device=device) for name, value in fields.items()})

        return cls([replace(m, batch=empty(m.batch), draw=empty(m.draw)) for m in minibatches])

    def fill(self, minibatches: Sequence[Minibatch]) -> None:
        for static, given in zip(self.minibatches, minibatches, strict=True):
            for target, source in ((static.batch, given.batch), (static.draw, given.draw)):
                for name, value in source.items():
                    target[name].copy_(value, non_blocking=True)
            static.ids, static.epoch = given.ids, given.epoch


@dataclass
class _Recorded:
    inputs: StaticInputs
    calls: int = 0
    graph: Any = None
    outputs: Any = None


@dataclass
class CaptureCounts:
    """How often each way was taken since the start."""

    eager: int = 0
    captured: int = 0
    replayed: int = 0
    dropped: int = 0
    shapes: dict[Key, int] = field(default_factory=dict)


class CapturedStep:
    """`step` as CUDA graphs, one a combination of input shapes; see the module's text.

    Args:
        step: ``step(minibatches) -> pytree of tensors``, without a host sync; gradients must be set to None inside.
        device: where the static inputs live.
        warmup: eager steps before recording; eleven under DDP.
    """

    def __init__(self, step: Callable[[Sequence[Minibatch]], Any], device: torch.device | str, warmup: int = 3):
        self.step = step
        self.device = torch.device(device)
        self.warmup = warmup
        self.counts = CaptureCounts()
        self._known: OrderedDict[Key, _Recorded] = OrderedDict()
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None

    def __call__(self, minibatches: Sequence[Minibatch]) -> Any:
        key = shape_key(minibatches)
        entry = self._entry(key, minibatches)
        self.counts.shapes[key] = self.counts.shapes.get(key, 0) + 1
        entry.inputs.fill(minibatches)
        if not self._cuda or entry.calls < self.warmup:
            entry.calls += 1
            self.counts.eager += 1
            return self._eager(entry)
        if entry.graph is None:
            self._record(entry)
            self.counts.captured += 1
        entry.graph.replay()
        self.counts.replayed += 1
        # The next replay overwrites the graph's outputs, and logs read them later: hand out copies.
        return tree_map_only(Tensor, torch.clone, entry.outputs)

    def _entry(self, key: Key, minibatches: Sequence[Minibatch]) -> _Recorded:
        if key not in self._known:
            if len(self._known) >= MAX_GRAPHS:
                self._known.popitem(last=False)
                self.counts.dropped += 1
            self._known[key] = _Recorded(StaticInputs.like(minibatches, self.device))
        self._known.move_to_end(key)
        return self._known[key]

    def _eager(self, entry: _Recorded) -> Any:
        if not self._cuda:
            return self.step(entry.inputs.minibatches)
        # Autograd and lazily made state must first run on the stream that will record.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            outputs = self.step(entry.inputs.minibatches)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return outputs

    def _record(self, entry: _Recorded) -> None:
        torch.cuda.synchronize(self.device)
        entry.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(entry.graph, pool=self._pool, stream=self._stream):
                entry.outputs = self.step(entry.inputs.minibatches)
        except RuntimeError as error:
            raise CaptureError(
                f"The step cannot be recorded as a CUDA graph: {str(error).splitlines()[0]} "
                f"`forge-profile --check` lists what stands in the way; --without graph_step runs without it."
            ) from error
        if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(entry.outputs)[0]):
            raise CaptureError("The step returns no tensor, so nothing of it could be read after a replay.")


class BlockGraphs:
    """Blocks as CUDA graphs of their own forward and backward, sharing one pool; a new shape runs eagerly.

    The graph of a block is recorded after `warmup` training calls, from the inputs of the next.
    """

    def __init__(self, warmup: int = 1) -> None:
        self.warmup = warmup
        self._pool = torch.cuda.graph_pool_handle()

    def wrap(self, block: nn.Module) -> Callable[..., Any]:
        """A forward for `block`: eager at first, then recorded for the shapes seen; other shapes stay eager."""
        forward = block.forward
        state: dict[str, Any] = {"calls": 0, "graphed": None, "key": None}

        def call(*args: Any) -> Any:
            tensors = tuple(arg for arg in args if isinstance(arg, Tensor))
            if not torch.is_grad_enabled() or len(tensors) != len(args):
                return forward(*args)
            key = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
            state["calls"] += 1
            if state["graphed"] is None and state["calls"] == self.warmup + 1:
                samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
                holder = _Callable(block, forward)
                state["graphed"] = torch.cuda.make_graphed_callables(holder, samples, pool=self._pool)
                state["key"] = key
            if state["graphed"] is not None and key == state["key"]:
                return state["graphed"](*args)
            return forward(*args)

        return call


class _Callable(nn.Module):
    """A module with `block`'s parameters whose forward is the given function: what torch's helper wants."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]):
        super().__init__()
        self._parameters = dict(block.named_parameters())
        self._parameters = {name.replace(".", "/"): value for name, value in self._parameters.items()}
        self._run = forward

    def forward(self, *args: Any) -> Any:
        return self._run(*args)
