"""A window of steps under a profiler: torch's own (a page, a table and a Chrome trace), or marks for Nsight Systems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from vlaforge.graphs.check import Report, Watch
from vlaforge.graphs.counters import CompileCounters, read
from vlaforge.graphs.profile import read_profile, write_report
from vlaforge.runtime.args import TrainingArgs, profile_range


def torch_profiler(device: torch.device) -> profile:
    """The profiler whose result `graphs.profile.read_profile` reads."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, record_shapes=True, with_flops=True)


class StepProfiler:
    """Profiles steps A to B of one rank; use it in a ``with``, and tell it of each step.

    Writes ``rank0_steps_10-12.html`` (a page), ``.txt`` (its numbers) and ``.json`` (for Perfetto or chrome://tracing)
    to ``--profile-output-dir``. The step before the window is watched for host syncs, eagerly, which takes longer. With
    ``--use-nsys-profiler`` it only starts and stops the CUDA profiler and emits NVTX ranges: run the command under
    ``nsys profile --capture-range=cudaProfilerApi``.
    """

    def __init__(
        self,
        args: TrainingArgs,
        rank: int,
        device: torch.device,
        note: Callable[[str], None],
        plan: Callable[[], str] = str,
    ):
        self.first, self.last = args.profile_step_start, args.profile_step_end
        if args.profile is not None:
            self.first, self.last = profile_range(args.profile)
        wanted = args.profile is not None or args.use_pytorch_profiler or args.use_nsys_profiler
        self.on = wanted and rank in args.profile_ranks
        self.nsys, self.rank, self.device, self.note, self.plan = args.use_nsys_profiler, rank, device, note, plan
        self.folder = Path(args.profile_output_dir or Path(args.output_dir) / "profiler")
        self.conditions = {
            "model": args.model or "", "batch": str(args.per_device_batch_size), "dtype": args.dtype,
            "rank": str(rank), "torch": torch.__version__,
        }  # fmt: skip
        self._running: profile | torch.autograd.profiler.emit_nvtx | None = None
        self._watch: Watch | None = None
        self._check: Report | None = None
        self._began = 0

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_watch()
        self._stop(self.last)

    def before(self, step: int) -> None:
        """Called before the step's data are fetched; starts at the first one of the window that runs."""
        if not self.on or self._running is not None:
            return
        if step == self.first - 1 and not self.nsys:
            self._watch = Watch().__enter__()
        if not self.first <= step <= self.last:
            return
        self._began = step
        if self.nsys:
            torch.cuda.profiler.start()
            self._running = torch.autograd.profiler.emit_nvtx()
        else:
            self._counters = CompileCounters()
            self._running = torch_profiler(self.device)
        self._running.__enter__()

    def after(self, step: int) -> None:
        self._end_watch()
        if step >= self.last:
            self._stop(step)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
            self._check = watch.report()

    def _stop(self, step: int) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        running.__exit__(None, None, None)
        if self.nsys:
            torch.cuda.profiler.stop()
            return
        report = read_profile(running, max(1, step - self._began + 1), self.device)
        report.counts, report.recompiles = read(), self._counters.counts().recompiles
        report.check, report.plan, report.conditions = self._check, self.plan(), self.conditions
        name = f"rank{self.rank}_steps_{self._began}-{step}"
        path = write_report(report, self.folder, name, running)
        self.note(f"Profile of steps {self._began} to {step}: {path}, with {name}.txt and {name}.json beside it")
