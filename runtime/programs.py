"""Step programs (``--trainer-type``): what data a run reads, and what it minimises on each micro-batch.

The loop, the guards, the optimiser and checkpoints are the same for all programs. A program of your own is
a small class:

    class Mine(FinetuneTrainer):
        def loader(self, setup): ...           # any loader of `Minibatch`es, e.g. `Interleaved` over two
        def losses(self, model, minibatch): ...

registered by a package through the entry-point group ``vlaforge.trainers``:

    [project.entry-points."vlaforge.trainers"]
    Mine = "my_package.trainer:Mine"
"""

from __future__ import annotations

from torch import Tensor, nn

from vlaforge.data.schema import Minibatch
from vlaforge.models.base import Losses


class FinetuneTrainer:
    """One data stream and the model's own loss: supervised fine-tuning."""

    def counts(self, model: nn.Module, minibatch: Minibatch) -> dict[str, Tensor]:
        """The count of each loss term, from the batch alone; `model` is the bare one."""
        return model.counts(minibatch.batch)

    def losses(self, model: nn.Module, minibatch: Minibatch) -> Losses:
        """Sums and counts of a micro-batch; `model` may be wrapped, so it must be called, not asked for
        parts."""
        return model(minibatch.batch, minibatch.draw)
