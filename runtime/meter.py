"""How fast a run goes and what it waits for: rates between log points, stage times, memory, model FLOPs
used."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from vlaforge.data.schema import Contract, Minibatch
from vlaforge.graphs import Plan
from vlaforge.graphs.cost import meta_inputs, step_cost
from vlaforge.graphs.profile import stage
from vlaforge.models.base import EmbodiedModel
from vlaforge.runtime.lora import inject

GIB = 1024**3


@dataclass(frozen=True)
class Work:
    """What a micro-batch at full size costs, for model FLOPs utilisation; zeros where the device's peak is unknown.

    Args:
        flops: of forward and backward. tokens: through the repeated blocks. peak: FLOP/s of one device.
    """

    flops: float = 0.0
    tokens: int = 0
    peak: float = 0.0

    def used(self, micro: int, tokens: int, seconds: float) -> float:
        """The share of the peak that `micro` micro-batches with `tokens` in all made use of. Batches whose padding was
        cut count in proportion to their tokens."""
        share = tokens / self.tokens if self.tokens and tokens else micro
        return self.flops * share / seconds / self.peak


def work_of(model: EmbodiedModel, contract: Contract, plan: Plan) -> Work:
    """Counted on the meta device under the plan's options, before `model` is lowered; nothing is counted for a device
    without a known peak."""
    peak = plan.options.device_kind.flops(plan.options.torch_dtype)
    if not peak:
        return Work()
    with torch.device("meta"):
        twin = type(model)(model.config)
        if adapter := getattr(model, "lora", None):
            inject(twin, adapter.config)
    for name, parameter in model.named_parameters():
        twin.get_parameter(name).requires_grad_(parameter.requires_grad)
    cost, _ = step_cost(twin, contract, plan.options)
    batch, _ = meta_inputs(contract, plan.options.batch_size)
    return Work(float(cost.total.flops), model.token_count(batch), peak)


class Meter:
    """Counts samples, tokens and waiting since the last `read`.

    Args:
        device: whose memory is reported.
        world: ranks; counts of this rank times the ranks give the global rates.
        work: of one micro-batch, for ``mfu``.
    """

    def __init__(self, device: torch.device, world: int = 1, work: Work | None = None):
        self.device, self.world, self.work = device, world, work or Work()
        self.samples = self.tokens = self.steps = self.micro = 0
        self.waited = 0.0
        self.began = time.perf_counter()

    def add(self, minibatches: Sequence[Minibatch], tokens: int = 0) -> None:
        """Takes note of one step's micro-batches; `tokens` of them went through the backbone."""
        self.samples += sum(minibatch.batch.size for minibatch in minibatches)
        self.waited += sum(minibatch.waited_s for minibatch in minibatches)
        self.tokens += tokens
        self.micro += len(minibatches)
        self.steps += 1

    def pause(self) -> AbstractContextManager[None]:
        """Time inside the block (an evaluation, a checkpoint) is in no rate."""
        return self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        stopped = time.perf_counter()
        yield
        self.began += time.perf_counter() - stopped

    def read(self) -> dict[str, float]:
        """Rates since the last call, and the memory; counting starts anew."""
        now = time.perf_counter()
        elapsed = max(now - self.began, 1e-9)
        rates = {
            "samples_per_s": self.samples * self.world / elapsed,
            "step_time_s": elapsed / max(self.steps, 1),
            "data_wait": min(self.waited / elapsed, 1.0),
            "memory_gib": memory_gib(self.device),
        }
        if self.tokens:
            rates["tokens_per_s"] = self.tokens * self.world / elapsed
        if self.work.peak:
            rates["mfu"] = self.work.used(self.micro, self.tokens, elapsed)
        self.samples = self.tokens = self.steps = self.micro = 0
        self.waited, self.began = 0.0, now
        return rates


def memory_gib(device: torch.device) -> float:
    """Peak memory so far: the device's, or on a CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class StageTimer:
    """Times stages of the steps for which it is armed, and marks them for a running profiler; else it costs nothing.

    On CUDA the stages are timed by events on the stream, read when asked for: the step itself does not wait.
    """

    def __init__(self, device: torch.device):
        self.device, self.armed = device, False
        self._marks: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        if torch.autograd._profiler_enabled():
            return stage(name)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self._stage(name) if self.armed and not capturing else nullcontext()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = self._mark()
        yield
        self._marks.append((name, began, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """``time/<stage>`` in milliseconds, summed over the armed steps since the last call."""
        if self.device.type == "cuda" and self._marks:
            torch.cuda.synchronize(self.device)
        totals: dict[str, float] = {}
        for name, began, ended in self._marks:
            took = 1e3 * (ended - began) if isinstance(began, float) else began.elapsed_time(ended)
            totals[f"time/{name}"] = totals.get(f"time/{name}", 0.0) + took
        self._marks.clear()
        return totals
