"""One rank of a job that takes several runs in turn, so that starting processes is paid for once.

    torchrun --nproc-per-node N ranks_worker.py FILE     FILE: JSON list of {"name": ..., "argv": [...]}

Rank 0 writes FILE.out: for every run its losses and gradient norms, and what each rank holds.
"""

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.config import resolve_given
from vlaforge.runtime.dist import ProcessRanks, end, launched
from vlaforge.runtime.flags import parse
from vlaforge.runtime.metrics import Log
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.step import Step
from vlaforge.runtime.trainer import Trainer
from vlaforge.runtime.wrap import strategy_of


def local_bytes(tensors) -> int:
    held = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in held)


def run(argv, ranks):
    resolved = resolve_given(parse(TrainingArgs, argv))
    ranks.args = resolved.args
    if ranks.world > 1:
        ranks.strategy, ranks._shard_group = strategy_of(resolved.args, ranks.world), None
    trainer = Trainer(build_setup(resolved), None, ranks)
    counting = Traffic() if ranks.world > 1 and "--count-traffic" in sys.argv else nullcontext()
    with counting as traffic:
        trainer.train()
    weights = list(trainer.parts.model.parameters())
    moments = [t for leaf in trainer.parts.optimizer.leaves for t in leaf.state.values()]
    result = {"weights": local_bytes(weights), "optimizer": local_bytes(moments)}
    if traffic is not None:
        result |= {"traffic": traffic.bytes, "calls": traffic.calls}
    return result


class Traffic:
    """Calls, and bytes of whole tensors, of each kind of collective during one step: gathered, scattered, all-reduced;
    `scalars` are counts, norms and flags. DDP must be told `--ddp-comm-hook allreduce_hook`, else it calls from C++."""

    KINDS = {
        "all_gather_single": "gathered", "all_gather_into_tensor": "gathered", "reduce_scatter_tensor": "scattered",
        "reduce_scatter_single": "scattered", "all_reduce": "reduced",
    }  # fmt: skip
    SMALL = 1024

    def __init__(self):
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.inside = False

    def __enter__(self):
        self.plain = {name: getattr(dist, name) for name in self.KINDS if hasattr(dist, name)}
        for name, call in self.plain.items():
            setattr(dist, name, partial(self.counted, self.KINDS[name], call))
        self.step = Step.__call__

        def step(core, minibatches, run=self.step):
            self.calls, self.bytes, self.inside = {}, {}, True
            try:
                return run(core, minibatches)
            finally:
                self.inside = False

        Step.__call__ = step
        return self

    def __exit__(self, *_):
        for name, call in self.plain.items():
            setattr(dist, name, call)
        Step.__call__ = self.step

    def counted(self, kind, call, *args, **kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        size = max(t.numel() * t.element_size() for t in tensors)
        kind = "scalars" if size < self.SMALL else kind
        if self.inside:
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.bytes[kind] = self.bytes.get(kind, 0) + size
        return call(*args, **kwargs)


def main() -> None:
    # What is tested is how ranks, wrappers and compiled regions go together, not Inductor's code for this CPU.
    torch.compile = partial(torch.compile, backend="aot_eager")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    first = resolve_given(parse(TrainingArgs, jobs[0]["argv"])).args
    ranks = ProcessRanks(first, torch.device("cpu")) if launched() else Ranks()
    results = {}
    for job in jobs:
        rows = []
        Log.write = lambda self, row, rows=rows: rows.append(row)  # rank 0's rows, also without a folder of its own
        facts = run(job["argv"], ranks)
        results[job["name"]] = {
            "loss": [row["loss"] for row in rows], "grad_norm": [row["grad_norm"] for row in rows],
            "ranks": ranks.gather(facts),
        }  # fmt: skip
        torch._dynamo.reset()
    if ranks.leads:
        Path(sys.argv[1] + ".out").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()
        end(0)


if __name__ == "__main__":
    main()
