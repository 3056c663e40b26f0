"""A window of steps under a profiler: torch's own (a Chrome trace and a table), or marks for Nsight Systems."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from vlaforge.runtime.args import TrainingArgs, profile_range


class StepProfiler:
    """Profiles steps A to B of one rank; use it in a ``with``, and tell it of each step.

    Writes ``rank0_steps_10-12.json`` (for chrome://tracing or Perfetto) and ``.txt`` to ``--profile-output-dir``. With
    ``--use-nsys-profiler`` it only starts and stops the CUDA profiler and emits NVTX ranges: run the command under
    ``nsys profile --capture-range=cudaProfilerApi``.
    """

    def __init__(self, args: TrainingArgs, rank: int, device: torch.device, note: Callable[[str], None]):
        self.first, self.last = args.profile_step_start, args.profile_step_end
        if args.profile is not None:
            self.first, self.last = profile_range(args.profile)
        wanted = args.profile is not None or args.use_pytorch_profiler or args.use_nsys_profiler
        self.on = wanted and rank in args.profile_ranks
        self.nsys, self.rank, self.device, self.note = args.use_nsys_profiler, rank, device, note
        self.folder = Path(args.profile_output_dir or Path(args.output_dir) / "profiler")
        self._running: profile | torch.autograd.profiler.emit_nvtx | None = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Called before the step's data are fetched; starts at the first one of the window that runs."""
        if not self.on or self._running is not None or not self.first <= step <= self.last:
            return
        if self.nsys:
            torch.cuda.profiler.start()
            self._running = torch.autograd.profiler.emit_nvtx()
        else:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities, record_shapes=True)
        self._running.__enter__()

    def after(self, step: int) -> None:
        if step >= self.last:
            self._stop()

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        running.__exit__(None, None, None)
        if self.nsys:
            torch.cuda.profiler.stop()
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{self.rank}_steps_{self.first}-{self.last}.json"
        running.export_chrome_trace(str(path))
        by = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        path.with_suffix(".txt").write_text(running.key_averages().table(sort_by=by, row_limit=40), encoding="utf-8")
        self.note(f"Profile of steps {self.first} to {self.last}: {path} and {path.with_suffix('.txt').name}")
