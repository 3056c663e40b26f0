"""The `forge-*` commands from their first moment on, whatever a shell or a scheduler made of their surroundings.

    forge-run = "vlaforge.runtime.commands.start:run"           (pyproject.toml)

Ctrl-C ends them with one line and exit code 130, also while what they import is still loading. File names are UTF-8.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module

INTERRUPTED = 128 + signal.SIGINT


def _utf8() -> None:
    """Starts the process again in Python's UTF-8 mode where names are of another encoding (``LC_ALL=C PYTHONUTF8=0``):
    pyarrow, safetensors and the video libraries open files by UTF-8 names alone."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})


def command(name: str, module: str) -> Callable[[], int]:
    """The console script `name`: imports `module` and returns what its ``main()`` does, or 130 when interrupted."""

    def start() -> int:
        _utf8()

        def leave(*_: object) -> None:
            # An exception would come out in the middle of an import, where libraries catch what they did not expect.
            os.write(2, f"{name}: interrupted\n".encode())
            os._exit(INTERRUPTED)

        heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not where a shell has it ignored
        if heard:
            signal.signal(signal.SIGINT, leave)
        main = import_module(module).main
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main()
        except KeyboardInterrupt:
            print(f"{name}: interrupted", file=sys.stderr)
            return INTERRUPTED

    return start


run = command("forge-run", "vlaforge.runtime.commands.run")
data = command("forge-data", "vlaforge.runtime.commands.data")
parity = command("forge-parity", "vlaforge.runtime.commands.parity")
profile = command("forge-profile", "vlaforge.runtime.commands.profile")

if __name__ == "__main__":  # one rank of a job
    sys.exit(run())
