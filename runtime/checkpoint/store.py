"""The checkpoints of one run: saving now or in the background, keeping some, finding the newest whole one.

<output-dir>/checkpoints/steps_40/   see `files` (how it is written) and `formats` (what the tensors
look like)
                         last        link to the newest
                         best        link to the one with the least evaluation metric
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.runtime.checkpoint import files, formats
from vlaforge.runtime.checkpoint.formats import Format, Groups

PREFIX = "steps_"
GIB = 1024**3


@dataclass(frozen=True)
class Content:
    """Everything that a checkpoint holds.

    Args:
        step: completed optimiser steps.
        groups: tensors by group (``model``, ``ema``, ``optim``) and canonical name.
        texts: file name → content (``config.yaml``, ``state.json``, ...).
        copies: file name → file to copy (``tokenizer.json``).
        about: facts for the manifest.
    """

    step: int
    groups: Groups
    texts: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """Saves and finds a run's checkpoints.

    Args:
        folder: ``<output-dir>/checkpoints``; made when the first one is saved.
        format: of the tensors.
        keep: how many newest ones stay; None keeps all. The best one stays as well.
        background: write in a thread, from a copy of the tensors, while training goes on.
        note: gets a sentence for the log.
    """

    def __init__(
        self,
        folder: Path,
        *,
        format: Format = "safetensors",
        keep: int | None = None,
        background: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self.format, self.keep, self.background = folder, format, keep, background
        self.note = note
        self.stalled_s = 0.0
        """Seconds that training stood still for saving, in all."""
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._best: tuple[float, int] | None = self._stored_best()

    # ------------------------------------------------------------------------------------------ saving

    def save(self, content: Content, best: float | None = None) -> None:
        """Writes one checkpoint; in the background this returns once the tensors are copied.

        `best` is this step's evaluation metric: the least so far is marked, and never pruned.

        Raises:
            UserError: this or an earlier background save failed (disk full, folder not writable); what was
                saved before is intact.
        """
        began = time.perf_counter()
        self.wait()
        if not self.background or not self._copy_fits(content.groups):
            self._run(content, best)
            self._raise()
        else:
            copied = snapshot(content.groups, self._buffers)
            content = Content(content.step, copied, content.texts, content.copies, content.about)
            self._thread = threading.Thread(target=self._run, args=(content, best), name="checkpoint")
            self._thread.start()
        self.stalled_s += time.perf_counter() - began

    def _copy_fits(self, groups: Groups) -> bool:
        """Whether the host has memory for a copy, unless it holds one already."""
        if self._buffers:
            return True
        needed = sum(v.numel() * v.element_size() for tensors in groups.values() for v in tensors.values())
        free = free_memory()
        if free is None or needed < 0.8 * free:
            return True
        self.note(
            f"Warning: a copy of the checkpoint needs {needed / GIB:.1f} GiB and the host has {free / GIB:.1f} GiB "
            "free: this one is written in the foreground."
        )
        return False

    def wait(self) -> None:
        """Until the background save is done; raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    @property
    def writing(self) -> bool:
        """Whether a background save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Raises the error of a background save that has failed, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, content: Content, best: float | None) -> None:
        began = time.perf_counter()
        draft = None
        try:
            draft = files.Draft(self.folder, f"{PREFIX}{content.step}")
            path = write(draft, content, self.format)
            self._link("last", path)
            if best is not None and (self._best is None or best < self._best[0]):
                self._best = (best, content.step)
                self._link("best", path)
            self._prune()
            self.note(f"Checkpoint: {path} ({time.perf_counter() - began:.1f} s)")
        except OSError as error:
            self._error = self._explained(error)
        except Exception as error:
            self._error = error
        finally:
            if draft is not None:
                draft.discard()

    def _explained(self, error: OSError) -> UserError:
        held = [step for step, _ in self.listed()]
        kept = f"the last whole checkpoint is {PREFIX}{held[-1]}" if held else "no checkpoint was saved before"
        return UserError(f"The checkpoint could not be saved: {reason(error, self.folder)}; {kept}.")

    def _link(self, name: str, target: Path) -> None:
        """Points `name` to a checkpoint in one move; file systems without links go without."""
        fresh = self.folder / f".link-{name}"
        try:
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(target.name)
            os.replace(fresh, self.folder / name)
        except OSError:
            return

    def _prune(self) -> None:
        if self.keep is None:
            return
        kept = {step for step, _ in self.listed()[-self.keep :]}
        if self._best is not None:
            kept.add(self._best[1])
        for step, path in self.listed():
            if step not in kept:
                files.remove(path)

    # ------------------------------------------------------------------------------------------ finding

    def listed(self) -> list[tuple[int, Path]]:
        """(step, folder) of what bears a checkpoint's name, oldest first."""
        found = []
        for path in self.folder.glob(f"{PREFIX}*"):
            number = path.name.removeprefix(PREFIX)
            if number.isdigit() and path.is_dir():
                found.append((int(number), path))
        return sorted(found)

    def newest(self) -> tuple[int, Path] | None:
        """The newest whole checkpoint; broken newer ones are passed over with a note on each."""
        for step, path in reversed(self.listed()):
            fault = _fault(path)
            if fault is None:
                return step, path
            self.note(f"Warning: checkpoint {path} is broken ({fault}); an earlier one is used.")
        return None

    def sweep(self) -> None:
        """Removes what a killed process left half-written."""
        for name in files.sweep(self.folder):
            self.note(f"Removed {name}, which an earlier run left unfinished.")

    def _stored_best(self) -> tuple[float, int] | None:
        try:
            about = files.manifest(self.folder / "best")
            return float(about["best"]), int(about["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


_WHOLE: set[tuple[Any, ...]] = set()


def _fault(path: Path) -> str | None:
    """`files.fault`, remembering folders that were found whole for as long as none of their files changes."""
    files_of = sorted(entry for entry in path.rglob("*") if entry.is_file())
    mark = (path, *((entry, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in files_of))
    if mark in _WHOLE:
        return None
    found = files.fault(path)
    if found is None:
        _WHOLE.add(mark)
    return found


def write(draft: files.Draft, content: Content, format: Format) -> Path:
    """All of `content` into the draft, committed; returns the checkpoint's folder."""
    formats.write(draft, format, content.groups)
    for name, text in content.texts.items():
        draft.text(name, text)
    for name, source in content.copies.items():
        draft.copy(source, name)
    return draft.commit({"step": content.step, "tensors": format, **content.about})


def snapshot(groups: Groups, kept: dict[str, Tensor] | None = None) -> dict[str, dict[str, Tensor]]:
    """A copy of all tensors on the host that training cannot change any more; ties stay ties.

    `kept` holds the buffers of an earlier copy by name: they are used again where they fit, because fresh (and on a
    GPU page-locked) memory costs more than the copy. From a GPU the copies are queued behind the work so far and
    waited for together.
    """
    copies: dict[tuple, Tensor] = {}
    kept = {} if kept is None else kept
    used: set[str] = set()

    def copied(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or key not in copies:
            host = kept.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            kept[name] = host
            used.add(name)
            copies[key] = host.copy_(tensor, non_blocking=True)
        return copies[key]

    made = {
        group: {name: copied(f"{group}/{name}", value) for name, value in tensors.items()}
        for group, tensors in groups.items()
    }
    for name in set(kept) - used:
        del kept[name]
    if torch.cuda.is_available() and any(key[0].type == "cuda" for key in copies):
        torch.cuda.synchronize()
    return made


def free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def reason(error: OSError, folder: Path) -> str:
    """An operating system's error about `folder` in plain words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of '{folder}' is full; free some space, or save less with --save-total-limit"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"'{folder}' is not writable ({error.strerror})"
    return f"{error.strerror or error} ('{error.filename or folder}')"
