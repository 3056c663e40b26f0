"""The life of a run: build, resume, step, log, evaluate, save, and end well whatever happens.

`Trainer(setup, hooks).train()` runs one configuration to its end. What a step is stands in `step`, what is
built in `assemble`, what is saved in `checkpoint`; this file is the order of events.

Signals: SIGTERM and SIGINT end the run after the present step, with a checkpoint. Faults of the outside
(disk full, dataset gone, folder not writable) end it with one sentence; the last checkpoint stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.data.maker import SampleError
from vlaforge.data.schema import Minibatch
from vlaforge.graphs.profile import stage
from vlaforge.runtime import meta
from vlaforge.runtime.assemble import Parts, assemble, build_model, build_plan, to_device
from vlaforge.runtime.checkpoint import files, rehearsal
from vlaforge.runtime.checkpoint.state import capture, restore
from vlaforge.runtime.checkpoint.store import Checkpoints, Content, reason
from vlaforge.runtime.evaluate import held_out_loss
from vlaforge.runtime.hooks import Hooks
from vlaforge.runtime.meter import Meter, StageTimer, work_of
from vlaforge.runtime.metrics import Log, open_log
from vlaforge.runtime.optim.vanish import TELLING, Unmoved
from vlaforge.runtime.params import build_groups_of
from vlaforge.runtime.process import Garbage, StopSignal, locked, prepare
from vlaforge.runtime.profiler import StepProfiler
from vlaforge.runtime.programs import samples_of
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.reporter import Reporter, check_distinct
from vlaforge.runtime.setup import Setup


class Trainer:
    """One run.

    Args:
        setup: data, configuration and device, already checked.
        hooks: is told what happens.
        ranks: the other processes; one process by default.
        held: the caller holds the output folder's lock already.

    Attributes:
        model: the bare model on `device`, from `hooks.started` on.
        completed: optimiser steps that lie behind.
        checkpoint: the folder of the last checkpoint that was begun, or None.
        stopped: the signal that ended the run early, or None.
    """

    model: nn.Module
    parts: Parts
    log: Log

    def __init__(self, setup: Setup, hooks: Hooks | None = None, ranks: Ranks | None = None, held: bool = False):
        self._held = held
        self.setup, self.args, self.device = setup, setup.args, setup.device
        self.hooks, self.ranks = hooks or Hooks(), ranks or Ranks()
        self.folder = Path(self.args.output_dir)
        self.store = Checkpoints(
            self.folder / "checkpoints",
            format=self.args.save_format,
            keep=self.args.save_total_limit,
            background=self.args.async_save,
            note=self.hooks.note,
        )
        self.signal = StopSignal()
        self.timer = StageTimer(self.device)
        self.completed = 0
        self.checkpoint: Path | None = None
        self._saved = -1

    @property
    def stopped(self) -> str | None:
        return self.signal.name

    def train(self) -> None:
        """Runs to the end, or to a signal. Raises UserError for faults that a person can mend."""
        with ExitStack() as stack:
            if self.ranks.leads and not self._held:
                stack.enter_context(locked(self.folder))
            stack.enter_context(self.signal.watch())
            garbage = stack.enter_context(Garbage(self.args.manual_gc, self.args.manual_gc_interval).held())
            self._build()
            profiler = StepProfiler(self.args, self.ranks.rank, self.device, self.hooks.note, self.parts.plan.text)
            self.profiler = stack.enter_context(profiler)
            stack.callback(self.parts.feed.close)
            stack.callback(self.log.close)
            try:
                self._loop(garbage)
                self._end()
            except OSError as error:
                raise UserError(f"The run stopped after step {self.completed}: {self._why(error)}.") from error
            finally:
                self._settle()

    # ------------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        for note in prepare(self.args, self.ranks.rank):
            self.hooks.note(note)
        if self.ranks.leads:
            self.store.sweep()
        found = self._found()
        if self.args.init_on_meta:
            meta.check(self.args, self.ranks.world, found is not None)
        self.model = build_model(self.setup, found, self.hooks.note)
        self.completed = int(files.manifest(found)["step"]) if found is not None else 0
        if not self.args.init_on_meta:
            self.hooks.started(self)
        groups = build_groups_of(self.args, self.model)
        plan = build_plan(self.setup, self.model, groups)
        self.hooks.planned(plan)
        work = work_of(self.model, self.setup.contract, plan)

        def filled(model: nn.Module) -> None:
            if self.args.init_on_meta:
                account = meta.fill(model, self.setup.resolved.family, self.args, found, self.device)
                self.hooks.note(f"Each rank read its shards of {found or self.args.pretrained_checkpoint}")
                self.hooks.note(f"  {account.text()}")

        self.parts = assemble(self.setup, self.model, groups, plan, self.ranks, self.timer, filled)
        if self.args.init_on_meta:
            with self.ranks.gathered(self.model):
                self.hooks.started(self)
        if found is not None:
            self.completed, notes = restore(self.parts, self.ranks, found)
            self.checkpoint, self._saved = found, self.completed
            for note in notes:
                self.hooks.note(note)
        self.unmoved = Unmoved(self.parts.optimizer)
        if self.unmoved:
            self.hooks.note(
                "Warning: low-precision weights without fp32 masters; --master-weights keeps small updates."
            )
        self.ranks.agree(self._facts())
        for note in self.ranks.notes(self.parts):
            self.hooks.note(note)
        if found is None and self.args.save_interval and self.args.save_rehearsal:
            self._rehearse()
        tree = self.setup.resolved.tree()
        self.log = open_log(self.args, self.folder, tree, self.completed) if self.ranks.leads else Log([])
        stages = bool(self.args.timing_log_level)
        self.reporter = Reporter(self.log, self.hooks, self.parts.core.guard, self.ranks, stages)
        self.meter = Meter(self.device, self.ranks.world, work)

    def _found(self) -> Path | None:
        """The checkpoint to resume from, when that was asked for."""
        if not self.args.resume:
            return None
        newest = self.store.newest()
        if newest is None:
            raise UserError(f"There is no whole checkpoint in '{self.store.folder}' to resume from.")
        return newest[1]

    def _facts(self) -> dict[str, str]:
        """What must be the same on every rank before the first step."""
        listed = [f"{n} {tuple(p.shape)} {p.requires_grad}" for n, p in self.model.named_parameters()]
        return {
            "parameters": "\n".join(listed),
            "configuration": self.setup.resolved.digest(),
            "dataset": self.setup.dataset.fingerprint(),
            "normalisers": self.setup.normalizers.hash,
            "completed steps": str(self.completed),
        }

    def _rehearse(self) -> None:
        content = self._content(0, None)
        if not self.ranks.leads:
            return
        moments = 2 * sum(leaf.weight.numel() * leaf.weight.element_size() for leaf in self.parts.optimizer.leaves)
        later = moments if self.args.save_training_state else 0
        self.hooks.note(rehearsal.rehearse(self.store.folder, content, self.args.save_format, later))

    # ------------------------------------------------------------------------------------------ stepping

    def _loop(self, garbage: Garbage) -> None:
        batches, first = to_device(self.parts.loader, self.device), True
        while self.completed < self.args.train_iters:
            step = self.completed + 1
            self.profiler.before(step)
            minibatches = self._next(batches)
            if first:
                check_distinct(self.ranks, minibatches)
                first = False
            self.reporter.taken(step, minibatches)
            detail = self.args.detail_log_interval
            self.timer.armed = bool(detail) and step % detail == 0
            self.ranks.tell(step)
            metrics = self._step(minibatches)
            self.completed = step
            self.profiler.after(step)
            self.meter.add(minibatches, self._tokens(minibatches))
            self._after(step, metrics)
            garbage.after(step)
            if self.ranks.any(self.signal.name is not None):
                return

    def _step(self, minibatches: list[Minibatch]) -> dict[str, torch.Tensor]:
        """One step; where updates may vanish, the steps whose stages are timed are looked at for that."""
        looking = self.timer.armed and bool(self.unmoved)
        if looking:
            self.unmoved.before()
        metrics = self.parts.step(minibatches)
        if looking and int(metrics["in_a_row"]) == 0 and (share := self.unmoved.share()) > TELLING:
            metrics = {**metrics, "unmoved": torch.tensor(share, device=metrics["loss"].device)}
            self.hooks.note(
                f"Warning: the last update left {share:.0%} of the low-precision weights where they were: use "
                "--master-weights, or a higher rate."
            )
        return metrics

    def _next(self, batches: Iterator[Minibatch]) -> list[Minibatch]:
        try:
            with stage("data"):
                return [next(batches) for _ in range(self.parts.micro_batches)]
        except SampleError as error:
            raise UserError(f"The run stopped after step {self.completed}: {error}. {self._resumable()}") from error

    def _after(self, step: int, metrics: Mapping[str, torch.Tensor]) -> None:
        """Logging, evaluation and saving that are due after `step`."""
        last = step == self.args.train_iters
        evaluating = bool(self.args.eval_interval) and (last or step % self.args.eval_interval == 0)
        results: Mapping[str, float] = {}
        if evaluating:
            with self.meter.pause():
                results = self._evaluate(step)
        if evaluating or last or step % self.args.log_interval == 0 or self.timer.armed:
            self._log(step, metrics, results)
        self.store.poll()
        interval = self.args.save_interval
        if (interval and (step % interval == 0) and not last) or (last and interval):
            self._save(results)

    def _log(self, step: int, metrics: Mapping[str, torch.Tensor], results: Mapping[str, float]) -> None:
        samples = samples_of(self.parts.feed)
        per_epoch = self.parts.feed.steps_per_epoch
        facts = {**self.meter.read(), "samples": samples, "epoch": step / per_epoch, **self.timer.read(), **results}
        if -1 not in self.args.loss_log_rank:
            shares = self.ranks.gather(float(self.parts.core.own_loss))
            facts |= {f"loss/rank{r}": shares[r] for r in self.args.loss_log_rank if r < len(shares)}
        self.reporter.log(step, metrics, facts, now=bool(results))

    def _tokens(self, minibatches: list[Minibatch]) -> int:
        return sum(self.model.token_count(minibatch.batch) for minibatch in minibatches)

    # ------------------------------------------------------------------------------------------ evaluating

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model holds its averaged weights inside the block, when the run keeps an average."""
        with self.parts.ema.swapped_in() if self.parts.ema is not None else nullcontext():
            yield

    def _evaluate(self, step: int) -> Mapping[str, float]:
        with self.averaged():
            loss = held_out_loss(self.setup, self.parts, self.ranks)
            with self.ranks.gathered(self.model):
                return {**loss, **self.hooks.evaluate(self, step)}

    # ------------------------------------------------------------------------------------------ saving

    def _save(self, results: Mapping[str, float] | None = None) -> None:
        if self._saved == self.completed:
            return
        metric = (results or {}).get("eval_error", (results or {}).get("eval_loss"))
        with self.meter.pause():
            content = self._content(self.completed, metric)
            if self.ranks.leads:
                self.store.save(content, metric)
        self._saved = self.completed
        self.checkpoint = self.store.folder / f"steps_{self.completed}"

    def _content(self, step: int, metric: float | None) -> Content:
        """What a checkpoint of this moment holds; all ranks call it, and what they share is put together."""
        content = capture(self.setup, self.parts, self.ranks, step, metric)
        return replace(content, groups=self.ranks.collected(content.groups))

    def _end(self) -> None:
        """The last rows, checkpoint and words of a run that was not cut off by an error."""
        self.reporter.flush()
        if self.args.save_interval:
            self._save()
        self.store.wait()
        if self.stopped is not None:
            self.hooks.note(f"Stopped by {self.stopped} after step {self.completed}. {self._resumable()}")
            return
        with self.averaged(), self.ranks.gathered(self.model):
            self.hooks.finished(self)

    def _settle(self) -> None:
        """Lets a background save finish; an error that already ends the run is the one to hear of."""
        try:
            self.store.wait()
        except UserError as error:
            self.hooks.note(str(error))

    def _resumable(self) -> str:
        if self.checkpoint is None:
            return "No checkpoint was saved."
        return f"The last checkpoint is {self.checkpoint}; continue with --resume."

    def _why(self, error: OSError) -> str:
        return f"{reason(error, self.folder)}. {self._resumable()}".rstrip(".")
