"""Before the first step: a checkpoint is written, read back and compared, so that no run finds out hours
later.

It goes through the same code as all later ones, and tells whether the disk will hold them.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from vlaforge.data.errors import UserError
from vlaforge.runtime.checkpoint import files, formats
from vlaforge.runtime.checkpoint.formats import Format
from vlaforge.runtime.checkpoint.store import Content, reason, write
from vlaforge.runtime.checkpoint.tensors import whole

NAME = ".rehearsal"
GIB = 1024**3


def rehearse(folder: Path, content: Content, format: Format, later: int) -> str:
    """Saves `content` aside in `folder`, reads it back, compares every tensor and removes it again.

    `later` are bytes that the checkpoints of the run will hold beyond this one (moments of the optimiser).

    Returns:
        A sentence for the log.

    Raises:
        UserError: it cannot be written, does not come back as it was, or the disk is too small for one more.
    """
    began = time.perf_counter()
    draft = None
    try:
        draft = files.Draft(folder, NAME)
        path = write(draft, content, format)
        _compare(path, content)
        size = sum(entry["size"] for entry in files.manifest(path)["files"].values())
        files.remove(path)
    except OSError as error:
        raise UserError(f"A checkpoint cannot be saved: {reason(error, folder)}.") from error
    finally:
        if draft is not None:
            draft.discard()
    free = shutil.disk_usage(folder).free
    if free < size + later:
        raise UserError(
            f"A checkpoint will need {(size + later) / GIB:.3g} GiB, but the disk of '{folder}' has only "
            f"{free / GIB:.3g} GiB free: make room, or choose another --output-dir."
        )
    seconds = time.perf_counter() - began
    return f"Checkpoint rehearsal: {size / 2**20:.1f} MiB saved, read back and equal ({seconds:.1f} s)"


def _compare(path: Path, content: Content) -> None:
    fault = files.fault(path)
    if fault is not None:
        raise UserError(f"A checkpoint does not come back as it was saved: {fault}.")
    for group, tensors in content.groups.items():
        stored = formats.read(path, group) or {}
        if set(stored) != set(tensors):
            raise UserError(f"A checkpoint does not come back as it was saved: names of its {group} differ.")
        for name, tensor in tensors.items():
            back = stored.get(name)
            if back is None or back.dtype != tensor.dtype or not torch.equal(back, whole(tensor)):
                raise UserError(f"A checkpoint does not come back as it was saved: {group} {name} differs.")
