"""The `forge-*` commands from their first moment on: Ctrl-C ends them with one line and exit code 130, also while what
they import is still loading.

    forge-run = "vlaforge.runtime.commands.start:run"           (pyproject.toml)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module

INTERRUPTED = 128 + signal.SIGINT


def command(name: str, module: str) -> Callable[[], int]:
    """The console script `name`: imports `module` and returns what its ``main()`` does, or 130 when interrupted."""

    def start() -> int:
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
