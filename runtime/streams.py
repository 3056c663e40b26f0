"""Standard output as the commands need it, whatever a shell or a scheduler made of it."""

from __future__ import annotations

import errno
import os
import sys


def tolerant() -> None:
    """Makes standard output take any text: a closed one swallows it, and what its encoding lacks becomes ``?``."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (it is closed with the process)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def unwritable(error: OSError) -> str | None:
    """The sentence for a write that failed because of the disk, None for any other fault of the system."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    where = f"'{error.filename}'" if error.filename else "what a command says or keeps"
    return f"Cannot write {where}: {error.strerror}; make room, or choose another --output-dir."
