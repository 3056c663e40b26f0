"""Every installed command hears Ctrl-C from its first import on: one line, exit code 130, no trace."""

import os
import signal
import subprocess
import sys
from importlib.metadata import distribution

import pytest

COMMANDS = {entry.name: entry for entry in distribution("vlaforge").entry_points if entry.group == "console_scripts"}
ERRORS = "vlaforge.data.errors"
"""A module that every command imports while it loads."""

SCRIPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import {module}
sys.exit({module}.{call}())
"""


def interrupted(module: str, call: str, *argv: str, at: str = ERRORS, handler=signal.SIG_DFL, path: str = "") -> tuple:
    """Calls a console script, which gets SIGINT when it imports the module `at`; `handler` is what it inherits for it.

    Returns its exit code, standard output and standard error.
    """
    ended = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT.format(module=module, call=call, at=at), *argv],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_while_it_loads(name):
    entry = COMMANDS[name]
    assert interrupted(entry.module, entry.attr, "--help") == (130, "", f"{name}: interrupted\n")


def test_while_a_library_loads_that_catches_everything(tmp_path):
    (tmp_path / "catching.py").write_text(f"try:\n    import {ERRORS}\nexcept BaseException:\n    pass\nmain = int\n")
    (tmp_path / "x.py").write_text(
        "from vlaforge.runtime.commands.start import command\nstart = command('forge-x', 'catching')\n"
    )
    assert interrupted("x", "start", path=str(tmp_path)) == (130, "", "forge-x: interrupted\n")
    assert interrupted("x", "start", path=str(tmp_path), at="nothing") == (0, "", "")


def test_while_it_works():
    """The model's family is imported by what the command does."""
    ended = interrupted(
        "vlaforge.runtime.commands.start", "run", "--model", "pi05", "--plan", at="vlaforge.models.pi05.model"
    )
    assert ended == (130, "", "forge-run: interrupted\n")


def test_started_deaf_it_stays_deaf():
    """A shell lets what a script runs with ``&`` ignore Ctrl-C, which is meant for something else."""
    ended = interrupted("vlaforge.runtime.commands.start", "run", "--model", "pi5", handler=signal.SIG_IGN)
    assert ended == (2, "", "forge-run: Unknown model 'pi5': did you mean 'pi05'?\n")
