"""What a person sees while a run goes on: one live line in a terminal, plain lines in a pipe.

console = Console()
console.say("Dataset ...")                             a line of its own
with console.progress(total=400, done=0) as progress:
    progress.update(step, metrics)                     loss, samples/s, wait for data, time left
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from vlaforge.data.errors import UserError

PLAIN_EVERY_S = 1.0
"""In a pipe at most one line in this many seconds, so that fast steps do not flood a log."""


def duration(seconds: float) -> str:
    """``48 s``, ``3:05 min``, ``2:07 h``, ``3 d 4 h``."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 2 * 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


class Console:
    """Prints to `stream` (standard output), and all of it without the live line to `log` once that is set.

    `quiet` processes (all ranks but the first) print nothing.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False):
        self.stream, self.quiet = stream, quiet
        self.log: Path | None = None
        self._live: Live | None = None

    @property
    def _out(self) -> TextIO:
        return self.stream or sys.stdout

    @property
    def terminal(self) -> bool:
        return self._out.isatty()

    def say(self, text: str = "") -> None:
        """Prints lines, above the live one when there is one."""
        if self.quiet:
            return
        self.write_log(text)
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        """A terminal or file that takes no more (a full disk) does not end a run that has its own log."""
        try:
            print(text, file=self._out, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.log is None:
                raise UserError(f"Standard output cannot be written: {error.strerror}.") from error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._out.fileno())
            os.close(nowhere)
            self.write_log(f"Standard output cannot be written ({error.strerror}): what follows is in this file only.")

    def write_log(self, text: str) -> None:
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")

    def progress(self, total: int, done: int = 0) -> Progress:
        """The progress of `total` steps of which `done` are behind; use it in a ``with``."""
        return Progress(self, total, done)


class Progress:
    """The live line. `update` may be called from the training loop: it costs microseconds between draws."""

    def __init__(self, console: Console, total: int, done: int):
        self.console, self.total, self.first = console, total, done
        self._printed = -math.inf
        self._steady: tuple[int, float] | None = None

    def __enter__(self) -> Progress:
        if self.console.terminal and not self.console.quiet:
            rich = RichConsole(file=self.console._out)
            self._live = Live(Text(f"step {self.first}/{self.total}"), console=rich, refresh_per_second=4)
            self._live.start()
            self.console._live = self._live
        return self

    def __exit__(self, *_: object) -> None:
        if self.console._live is not None:
            self.console._live.stop()
            self.console._live = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows `metrics` (names of metrics.jsonl) as the state after `step`."""
        if self.console.quiet:
            return
        now = time.perf_counter()
        if self._steady is None:
            self._steady = (step, now)
        line = self.line(step, metrics, now)
        due = now - self._printed >= PLAIN_EVERY_S or step in (self.first + 1, self.total)
        if due:
            self._printed = now
        if self.console._live is not None:
            self.console._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            if due:
                self.console.write_log(line)
        elif due:
            self.console.say(line)

    def line(self, step: int, metrics: Mapping[str, float], now: float) -> str:
        width = len(str(self.total))
        parts = [f"step {step:>{width}}/{self.total}", f"loss {metrics['loss']:.4f}"]
        if "lr" in metrics:
            parts.append(f"lr {metrics['lr']:.2e}")
        if "grad_norm" in metrics:
            parts.append(f"grad {metrics['grad_norm']:.3g}")
        if "samples_per_s" in metrics:
            parts.append(f"{metrics['samples_per_s']:.3g} samples/s")
        if "data_wait" in metrics:
            parts.append(f"data wait {100 * metrics['data_wait']:.0f} %")
        if metrics.get("skipped"):
            parts.append(f"{metrics['skipped']:.0f} skipped")
        if (left := self.left(step, now)) is not None:
            parts.append(f"{duration(left)} left")
        return " · ".join(parts)

    def left(self, step: int, now: float) -> float | None:
        """Seconds to go, at the pace since the first logged step (which compiles, and says nothing of it)."""
        since, began = self._steady or (step, now)
        return (now - began) / (step - since) * (self.total - step) if step > since else None
