"""Feeds a trainer: whole micro-batches, made by persistent workers, in an order that resumes anywhere.

    with build_loader(dataset, processing, contract, batch_size=8, seed=0, num_workers=4) as loader:
        for minibatch in loader:              # endless unless `epochs` is given
            ...
            state = loader.state_dict()       # integers; what has been *yielded*, whatever was prefetched

One worker makes one whole micro-batch and hands it over as one block of memory (`parcel`), so the main process
collates nothing.
All randomness of a sample comes from (seed, epoch, row id): workers, ranks and restarts change nothing. Readers open
their files in the process that reads.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.maker import Failure, Maker
from vlaforge.data.parcel import Parcel, Ring, pack
from vlaforge.data.samplers import Cursor, Order, Request, Schedule, Shuffled
from vlaforge.data.schema import Contract, Minibatch, sample_rng
from vlaforge.data.streaming import StreamOrder

CONTEXTS = ("forkserver", "spawn", "fork")
FORMAT = 1


class Loader:
    """Yields the `Minibatch`es of one rank; iterate it once for a whole run. Made by `build_loader`.

    Iterating again continues from the cursor; a finite loader that has ended starts over from its first
    epoch.
    """

    def __init__(self, maker: Maker, schedule: Schedule, rank: int, identity: dict, options: dict):
        self.schedule, self.rank = schedule, rank
        self.waited_s = 0.0
        """Seconds that the consumer stood still for data, in all."""
        self._maker, self._identity, self._options = maker, identity, options
        self._cursor = Cursor()
        self._torch_loader: DataLoader | None = None
        self._ring: Ring | None = None
        self._running: Iterator[Minibatch | Failure] | None = None

    @property
    def cursor(self) -> Cursor:
        """Behind the last micro-batch that was yielded."""
        return self._cursor

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps an epoch, as a fraction unless incomplete steps are dropped."""
        steps = self.schedule.order.size / self.schedule.global_batch
        return float(int(steps)) if self.schedule.drop_last else steps

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the cursor, and what must be the same for it to mean the same samples."""
        return {"format": FORMAT, **self._cursor.state(), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues behind the micro-batch at which `state` was taken, with any number of ranks and workers.

        UserError when the data or the order is another one, because the cursor would then point to other
        samples.
        """
        other = {name: (state.get(name), value) for name, value in self._identity.items() if state.get(name) != value}
        if other or state.get("format") != FORMAT:
            listed = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in other.items())
            raise UserError(
                f"The data order cannot be resumed: {listed or 'unknown format of the saved state'}. Use the "
                f"same dataset, episodes, seed and shuffling, or start a new run from the weights."
            )
        cursor = Cursor(*(int(state[name]) for name in ("epoch", "offset", "samples", "micro")))
        if cursor.micro >= self.schedule.accumulate:
            cursor = Cursor(cursor.epoch, cursor.offset, cursor.samples)
        self.close()
        self._cursor = cursor

    def __iter__(self) -> Loader:
        if self._running is not None:
            self.close()
        if self.schedule.epochs is not None and self._cursor.epoch >= self.schedule.epochs:
            self._cursor = Cursor()
        self._running = self._start()
        return self

    def __next__(self) -> Minibatch:
        if self._running is None:
            iter(self)
        began = time.perf_counter()
        try:
            made = next(self._running)
        except StopIteration:
            self._cursor = self.schedule.next(self._cursor, self.rank)[1]
            self._running = None
            raise
        except (RuntimeError, OSError, EOFError) as error:  # what a dead worker had sent cannot be read either
            self.close()
            if not self._options["num_workers"]:
                raise
            raise RuntimeError(
                f"A data worker died ({error}). Often the machine ran out of memory: use fewer workers."
            ) from error
        waited = time.perf_counter() - began
        if isinstance(made, Failure):
            self.close()
            raise made.error()
        self._cursor = self.schedule.next(self._cursor, self.rank)[1]
        self.waited_s += waited
        made.waited_s = waited
        return made

    def close(self) -> None:
        """Ends the workers and drops what was prefetched; the cursor stays. Iterating starts new ones."""
        workers = getattr(self._torch_loader, "_iterator", None)
        self._running = self._torch_loader = self._ring = None
        if workers is not None:
            # Deleting it would do, but an exception's traceback may hold it, and until it is shut down torch raises
            # the death of one of its workers again at every later SIGCHLD.
            workers._shutdown_workers()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self) -> Iterator[Request]:
        at = self._cursor
        while True:
            request, at = self.schedule.next(at, self.rank)
            if request is None:
                return
            yield request

    def _start(self) -> Iterator[Minibatch | Failure]:
        if not self._options["num_workers"]:
            made = (self._maker[request] for request in self._requests())
            return map(_pinned, made) if self._options["pin_memory"] else made
        if self._torch_loader is None:
            self._ring = Ring(self._options["num_workers"], self._options["prefetch_factor"])
            self._torch_loader = DataLoader(
                self._maker,
                batch_size=None,
                sampler=_Restartable(self._requests),
                collate_fn=partial(_packed, self._ring),
                persistent_workers=True,
                **self._options,
            )
        with _child_signal_kept():
            return map(_opened, iter(self._torch_loader))


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Undoes what a starting DataLoader does to SIGCHLD: its handler raises in the main thread wherever that happens to
    be, in the middle of an optimiser update or a checkpoint. A dead worker is noticed at the next batch all the same.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if main and hasattr(signal, "SIGCHLD") else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


class _Restartable:
    """An iterable over a generator function: each `iter` starts from the loader's cursor of that moment."""

    def __init__(self, start):
        self._start = start

    def __iter__(self) -> Iterator[Request]:
        return self._start()


def _packed(ring: Ring, made: Minibatch | Failure) -> Parcel | Failure:
    """What crosses from a worker to the main process."""
    return pack(made, ring) if isinstance(made, Minibatch) else made


def _opened(made: Parcel | Minibatch | Failure) -> Minibatch | Failure:
    return made.open() if isinstance(made, Parcel) else made


def _pinned(made: Minibatch | Failure) -> Minibatch | Failure:
    return made.pin_memory() if isinstance(made, Minibatch) else made


def build_loader(
    dataset: Dataset,
    processing: Any,
    contract: Contract,
    *,
    batch_size: int,
    accumulate: int = 1,
    seed: int = 0,
    epochs: int | None = None,
    num_workers: int = 0,
    rank: int = 0,
    world: int = 1,
    sampler: str = "cyclic",
    shuffle: bool = True,
    drop_last: bool = False,
    trim: bool = True,
    training: bool = True,
    multiprocessing_context: str | None = None,
    seed_workers: bool = False,
    pin_memory: bool | None = None,
    prefetch: int = 2,
    streaming: bool = False,
    order: Order | None = None,
    costs: Sequence[float] | np.ndarray | None = None,
) -> Loader:
    """The loader of one rank.

    Args:
        dataset: any `Dataset`; must be picklable when there are workers, and open its files lazily.
        processing: the family's `Processing` (``needs()``, ``sample(sample, rng, training)``).
        contract: the family's batch contract: fields to stack, draws to make, axes to trim.
        batch_size: samples of one micro-batch of this rank; `accumulate` of them make a step.
        epochs: stop after so many; None never stops.
        sampler: ``cyclic``, ``block`` or ``balanced``, see `samplers.Schedule`.
        drop_last: leave an epoch's incomplete step out; otherwise it is filled from the next epoch.
        trim: cut masked cameras and padding at collate time, by the contract's trims.
        training: passed to the processing; False means no augmentation.
        seed_workers: also seed Python's, NumPy's and torch's global generators in each worker, for code of your own
            that draws from them; nothing here does.
        multiprocessing_context: of workers. Default forkserver: as quick as fork after the first worker, and
            safe with the threads of CUDA, video decoders and torch, which fork is not.
        pin_memory: page-locked staging; default when a CUDA device is present.
        prefetch: micro-batches that each worker keeps ready.
        streaming: read nearly sequentially, see `streaming.StreamOrder`.
        costs: of each position, for ``balanced``; default the dataset's own guess.
        order: what each epoch visits; default all positions, or a mixture's own order.
    """
    if not 0 <= rank < world:
        raise UserError(f"Rank {rank} is outside 0..{world - 1}.")
    if num_workers < 0:
        raise UserError(f"--num-workers is {num_workers}; it must be 0 or more.")
    if order is None:
        order = _order(dataset, batch_size, seed, shuffle, streaming)
    if streaming:
        sampler = "block"  # a rank's samples are those of its own streams
    if sampler == "balanced" and costs is None:
        costs = dataset.costs()
    schedule = Schedule(order, batch_size, world, accumulate, sampler, drop_last, epochs, costs)
    identity = {
        "seed": seed,
        "shuffle": shuffle,
        **order.identity(),
        "dataset": dataset.fingerprint(),
    }
    pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
    if num_workers:
        options |= {"prefetch_factor": prefetch, "multiprocessing_context": _context(multiprocessing_context)}
        if seed_workers:
            options["worker_init_fn"] = partial(_seed_worker, seed * world + rank)
    maker = Maker(dataset, processing, contract, seed=seed, training=training, trim=trim)
    return Loader(maker, schedule, rank, identity, options)


def _order(dataset: Dataset, batch_size: int, seed: int, shuffle: bool, streaming: bool) -> Order:
    own = getattr(dataset, "order", None)  # a mixture has one
    if streaming and own is not None:
        raise UserError("A mixture cannot be streamed; leave --streaming out.")
    if streaming:
        return StreamOrder.of(dataset, batch_size, seed=seed, shuffle=shuffle)
    return own(seed, shuffle) if own is not None else Shuffled(len(dataset), seed, shuffle)


def _seed_worker(seed: int, worker: int) -> None:
    value = int(sample_rng(seed, 0, worker, "worker").integers(2**31))
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 (the generator that foreign code draws from)
    torch.manual_seed(value)


def _context(name: str | None) -> multiprocessing.context.BaseContext:
    name = name or ("forkserver" if sys.platform == "linux" else "spawn")
    if name not in CONTEXTS:
        raise unknown("worker start method", name, CONTEXTS)
    context = multiprocessing.get_context(name)
    if name == "forkserver":
        # Imported once in the server, so that each worker starts in milliseconds and shares the pages.
        context.set_forkserver_preload(["vlaforge.data.loader"])
    return context
