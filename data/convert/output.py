"""The folder that a conversion writes: a temporary one beside the goal, renamed when all of it is there.

Whatever happens, also a kill, the source stays as it is, and the goal is either absent or whole.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlaforge.data.errors import UserError


def check_output(source: Path, goal: Path) -> None:
    """UserError unless `goal` is a new place (absent or an empty folder) outside `source`, and not around it."""
    inner, outer = goal.expanduser().resolve(), source.expanduser().resolve()
    if inner == outer:
        raise UserError(
            f"The output '{goal}' is the dataset itself: give another folder; conversion is never in place."
        )
    if outer in inner.parents:
        raise UserError(f"The output '{goal}' lies inside the dataset '{source}': give a folder outside it.")
    if inner in outer.parents:
        raise UserError(f"The output '{goal}' contains the dataset '{source}': give another folder.")
    if goal.is_file() or (goal.is_dir() and any(goal.iterdir())):
        raise UserError(f"The output '{goal}' exists already: give a new folder, or remove it first.")
    parent = _existing(inner.parent)
    if not os.access(parent, os.W_OK):
        raise UserError(f"The output '{goal}' cannot be written: no permission in '{parent}'.")


@contextmanager
def whole_folder(source: Path, goal: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes `goal` when the block ends well and is removed when it does not."""
    check_output(source, goal)
    goal = goal.expanduser().resolve()
    goal.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", suffix=".partial", dir=goal.parent))
    try:
        yield work
        _sync(work)
        if goal.is_dir():
            goal.rmdir()  # it was empty; anything that came into it meanwhile stops this
        work.chmod(0o755)  # mkdtemp's folders are private
        work.rename(goal)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def leftovers(goal: Path) -> list[Path]:
    """Folders that conversions to `goal` left when they were killed (or are writing now)."""
    goal = goal.expanduser().resolve()
    return sorted(goal.parent.glob(f".{glob.escape(goal.name)}.*.partial"))


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _sync(folder: Path) -> None:
    """Every file, then every folder, is on the disk before the rename is."""
    for where, _, names in os.walk(folder, topdown=False):
        for name in [*names, ""]:
            handle = os.open(os.path.join(where, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
