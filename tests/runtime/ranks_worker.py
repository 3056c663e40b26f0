"""One rank of a job that takes several runs in turn, so that starting processes is paid for once.

    torchrun --nproc-per-node N ranks_worker.py FILE     FILE: JSON list of {"name": ..., "argv": [...]}

Rank 0 writes FILE.out: for every run its losses and gradient norms, and what each rank holds.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.config import resolve_given
from vlaforge.runtime.dist import ProcessRanks, launched
from vlaforge.runtime.flags import parse
from vlaforge.runtime.metrics import Log
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.setup import build_setup
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
    traffic = Traffic() if ranks.world > 1 and "--count-traffic" in sys.argv else None
    if traffic:
        traffic.hook(trainer)
    trainer.train()
    weights = list(trainer.parts.model.parameters())
    moments = [t for leaf in trainer.parts.optimizer.leaves for t in leaf.state.values()]
    result = {"weights": local_bytes(weights), "optimizer": local_bytes(moments)}
    if traffic:
        result["traffic"] = traffic.bytes
    return result


class Traffic:
    """Bytes that this rank hands to each collective in the last step, by the collective's name."""

    NAMES = (
        "all_reduce", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter_single",
    )  # fmt: skip

    def __init__(self):
        self.bytes: dict[str, int] = {}

    def hook(self, trainer):
        def counted(name, call, *args, **kwargs):
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            self.bytes[name] = self.bytes.get(name, 0) + max(t.numel() * t.element_size() for t in tensors)
            return call(*args, **kwargs)

        for name in self.NAMES:
            if hasattr(dist, name):
                setattr(dist, name, partial(counted, name, getattr(dist, name)))


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


if __name__ == "__main__":
    main()
