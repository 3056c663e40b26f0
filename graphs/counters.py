"""What torch.compile did behind one's back: graphs, graph breaks with their reasons, recompiles, and when.

`CompileCounters` counts since it was made or last `mark`ed; a run marks it after warm-up, so that any later recompile
is news (it stalls every rank for seconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch._dynamo.utils import counters as dynamo_counters


@dataclass(frozen=True)
class Counts:
    """Totals of this process: compiled graphs, graph breaks by reason, recompiles, cache hits of Inductor's disk."""

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    recompiles: int = 0

    def since(self, earlier: Counts) -> Counts:
        breaks = {reason: count - earlier.breaks.get(reason, 0) for reason, count in self.breaks.items()}
        return Counts(
            self.graphs - earlier.graphs,
            {reason: count for reason, count in breaks.items() if count > 0},
            self.recompiles - earlier.recompiles,
        )

    def text(self) -> str:
        broken = sum(self.breaks.values())
        return f"{self.graphs} graphs, {broken} graph breaks, {self.recompiles} recompiles"


def read() -> Counts:
    """The totals now."""
    breaks = {str(reason).splitlines()[0]: count for reason, count in dynamo_counters["graph_break"].items()}
    graphs = int(dynamo_counters["stats"].get("unique_graphs", 0))
    return Counts(graphs, breaks, _recompiles())


def _recompiles() -> int:
    """Compilations of code that had been compiled before, except the first of each frame."""
    from torch._dynamo.utils import get_compilation_metrics

    return sum(1 for metric in get_compilation_metrics() if getattr(metric, "recompile_reason", None))


class CompileCounters:
    """Counts since the last `mark()`."""

    def __init__(self) -> None:
        self.start = read()

    def mark(self) -> None:
        self.start = read()

    def counts(self) -> Counts:
        return read().since(self.start)
