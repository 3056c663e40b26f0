"""One rank of a job in which rank 1 alone meets NaN targets in step 7; run by test_rank_nan.py under torchrun.

nan_worker.py FILE FLAGS...     rank 0 writes FILE: rows, and each rank's weights around the step, as checksums
"""

import json
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vlaforge.runtime import programs
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.config import resolve_given
from vlaforge.runtime.dist import ProcessRanks, end
from vlaforge.runtime.flags import parse
from vlaforge.runtime.metrics import Log
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.trainer import Trainer

POISONED = 7


class Poison(programs.FinetuneTrainer):
    """NaN in the targets of rank 1, in one step."""

    seen = 0

    def losses(self, model, minibatch):
        Poison.seen += 1
        if Poison.seen == POISONED and dist.get_rank() == 1:
            minibatch.batch["actions"][minibatch.batch["action_mask"]] = float("nan")
        return super().losses(model, minibatch)


def main(file: str, argv: list[str]) -> None:
    entry = types.SimpleNamespace(name="Poison", load=lambda: Poison)
    programs.entry_points = lambda group: [entry]
    resolved = resolve_given(parse(TrainingArgs, [*argv, "--trainer-type", "Poison"]))
    with ProcessRanks(resolved.args, torch.device("cpu")) as ranks:
        rows, sums = [], []
        Log.write = lambda self, row: rows.append(row)
        trainer = Trainer(build_setup(resolved), None, ranks)
        after = trainer._after

        def watched(step, metrics):
            local = (p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters())
            sums.append([float(p.detach().double().sum()) for p in local])
            after(step, metrics)

        trainer._after = watched
        trainer.train()
        everybody = ranks.gather(sums)
        states = ranks.gather(trainer.parts.core.guard.state())
        if ranks.leads:
            Path(file).write_text(json.dumps({"rows": rows, "sums": everybody, "states": states}))
        ranks.barrier()
    end(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
