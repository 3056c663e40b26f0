"""Step programs (``--trainer-type``): what data a run reads, and what it minimises on each micro-batch.

The loop, the guards, the optimiser and checkpoints are the same for all programs. A program of your own is a
small class, registered by a package through an entry point:

    class Mine(FinetuneTrainer):
        def loader(self, setup, contract, ranks): ...      # e.g. `Interleaved` over two loaders
        def losses(self, model, minibatch): ...            # e.g. by `minibatch.stream`

    [project.entry-points."vlaforge.trainers"]
    Mine = "my_package.trainer:Mine"

`docs/programs.md` walks through one that mixes two datasets with two losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.loader import Loader, build_loader
from vlaforge.data.schema import Contract, Minibatch
from vlaforge.models.base import Losses
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.ranks import Ranks

if TYPE_CHECKING:  # a benchmark on a bare machine has no readers
    from vlaforge.runtime.setup import Setup

ENTRY_POINTS = "vlaforge.trainers"


class FinetuneTrainer:
    """One data stream and the model's own loss: supervised fine-tuning.

    `settings` are the names and defaults of its ``--trainer-options``; another name is an error before the run.
    """

    settings: Mapping[str, str | None] = {}

    def prepare(self, model: nn.Module, setup: Setup) -> None:
        """Changes the bare model, with its weights loaded, before anything is frozen, lowered or wrapped."""

    def loader(self, setup: Setup, contract: Contract, ranks: Ranks) -> Any:
        """The endless loader of this rank's micro-batches (see `vlaforge.data.loader.Loader`).

        `contract` is the family's, with the trims that the plan settled on.
        """
        return stream(setup, contract, ranks)

    def micro_batches(self, setup: Setup) -> int:
        """How many micro-batches of the loader make one optimiser step."""
        return setup.args.gradient_accumulation_steps

    def embodiments(self, setup: Setup) -> frozenset[int] | None:
        """Numbers of all embodiments that training and evaluation will see; None where that is not known: a loader or a
        processing of another kind, which may override this."""
        number = getattr(setup.processing, "embodiment_of", None)
        if number is None or type(self).loader is not FinetuneTrainer.loader:
            return None
        datasets = [dataset for dataset in (setup.dataset, setup.held_out) if dataset is not None]
        return frozenset(number(name) for dataset in datasets for name in dataset.embodiments)

    def counts(self, model: nn.Module, minibatch: Minibatch) -> dict[str, Tensor]:
        """The count of each loss term, from the batch alone; `model` is the bare one."""
        return model.counts(minibatch.batch)

    def losses(self, model: nn.Module, minibatch: Minibatch) -> Losses:
        """Sums and counts of a micro-batch. `model` may be wrapped: call it, ask it for no parts.

        Another loss than the model's own is passed in: ``model(batch, draw, objective)`` runs
        ``objective(bare_model, batch, draw)`` inside the wrapper.
        """
        return model(minibatch.batch, minibatch.draw)


def stream(setup: Setup, contract: Contract, ranks: Ranks, **changes: Any) -> Loader:
    """The loader that the flags describe over `setup`'s dataset; `changes` go to `build_loader`."""
    args = setup.args
    options: dict[str, Any] = {
        "dataset": setup.dataset,
        "processing": setup.processing,
        "contract": contract,
        "batch_size": args.per_device_batch_size,
        "accumulate": args.gradient_accumulation_steps,
        "seed": args.seed,
        "num_workers": args.num_workers,
        "rank": ranks.rank,
        "world": ranks.world,
        "sampler": args.distributed_sampler_mode,
        "shuffle": args.sampler_shuffle,
        "drop_last": args.batch_drop_last,
        "streaming": args.streaming,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "seed_workers": args.dataloader_seed_workers or args.deterministic_mode,
    }
    return build_loader(**{**options, **changes})


def options(args: TrainingArgs, known: Mapping[str, str | None]) -> dict[str, str | None]:
    """``--trainer-options a=1,b=x`` over the defaults in `known`. UserError for another name or form."""
    found = dict(known)
    for part in filter(None, (args.trainer_options or "").split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--trainer-options: '{part}' must read name=value.")
        if name.strip() not in known:
            raise unknown("trainer option", name.strip(), known)
        found[name.strip()] = value.strip()
    return found


class Interleaved:
    """Several loaders as one: a step takes `pattern`'s streams in order, each micro-batch named by its
    stream.

    Args:
        loaders: stream name → loader.
        pattern: streams of the micro-batches of one step, ``("robot", "robot", "text")``.
    """

    def __init__(self, loaders: Mapping[str, Loader], pattern: tuple[str, ...]):
        if unused := set(loaders) ^ set(pattern):
            raise UserError(f"Streams and pattern differ in {', '.join(sorted(unused))}.")
        self.loaders, self.pattern = dict(loaders), pattern

    def __iter__(self) -> Iterator[Minibatch]:
        running = {name: iter(loader) for name, loader in self.loaders.items()}
        while True:
            for name in self.pattern:
                yield replace(next(running[name]), stream=name)

    @property
    def samples(self) -> int:
        """Consumed so far, over all streams and ranks."""
        return sum(loader.cursor.samples for loader in self.loaders.values())

    @property
    def steps_per_epoch(self) -> float:
        """Of the first stream of the pattern."""
        return self.loaders[self.pattern[0]].steps_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return {name: loader.state_dict() for name, loader in self.loaders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, loader in self.loaders.items():
            if name not in state:
                raise UserError(f"The checkpoint knows no data stream '{name}' (it has {', '.join(state)}).")
            loader.load_state_dict(state[name])

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()


def samples_of(loader: Any) -> int:
    """Samples consumed over all ranks, by a loader or an `Interleaved`."""
    return loader.samples if hasattr(loader, "samples") else loader.cursor.samples


def program(name: str) -> FinetuneTrainer:
    """The step program called `name`: ours, or one that an installed package registers. UserError
    otherwise."""
    if name == FinetuneTrainer.__name__:
        return FinetuneTrainer()
    registered = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in registered:
        raise unknown("trainer type", name, [FinetuneTrainer.__name__, *registered])
    return registered[name].load()()
