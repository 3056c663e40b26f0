"""The C code of this folder, compiled once by the machine's compiler for the machine's processor, kept in a cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CHUNK = 65536
"""Elements that a thread takes at a time."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", f"-DCHUNK={CHUNK}")
VECTORS = ("-mprefer-vector-width=512",)
"""Only where the compiler knows it."""


class NotBuilt(RuntimeError):
    """The library cannot be had here: no compiler, or it failed. The message says which."""


def compiler() -> list[str] | None:
    """The C compiler and its first arguments: ``$CC``, else the first of cc, gcc and clang; None when there is none."""
    given = shlex.split(os.environ.get("CC", ""))
    for command in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    return None


@cache
def load(folder: Path) -> ctypes.CDLL:
    """The library of all sources, compiled when `folder` has none for these sources, this compiler and this processor.
    Raises NotBuilt."""
    return ctypes.CDLL(str(_built(folder)))


def _built(folder: Path) -> Path:
    command = compiler()
    if command is None:
        raise NotBuilt("no C compiler was found (cc, gcc or clang; $CC names another)")
    sources = sorted(HERE.glob("*.c"))
    texts = [path.read_text() for path in sources + sorted(HERE.glob("*.h"))]
    key = hashlib.sha256("\0".join([*texts, *FLAGS, *VECTORS, *command, _processor()]).encode())
    target = folder / f"native-{key.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        # OpenMP and wide vectors are not on every machine: from the best down to what must work.
        for extras in (("-fopenmp", *VECTORS), ("-fopenmp",), ()):
            line = [*command, *FLAGS, *extras, *map(str, sources), "-o", str(made), "-lm"]
            run = subprocess.run(line, capture_output=True, text=True)
            if run.returncode == 0:
                os.replace(made, target)
                return target
    said = run.stderr.strip().splitlines()
    raise NotBuilt(f"{command[0]} could not compile it: {said[-1] if said else f'exit code {run.returncode}'}")


def _processor() -> str:
    """What of the machine decides the code: a cache may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    told = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return f"{platform.machine()} {platform.processor()} {' '.join(sorted(set(told)))}"
