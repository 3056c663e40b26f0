"""Loops in C for what neither torch nor its compiler does well on a CPU.

`use` settles the library that the ops of this process run on; `loops` is that library, or None.
"""

from __future__ import annotations

from vlaforge.kernels.native.build import CHUNK, NotBuilt, compiler
from vlaforge.kernels.native.many import Native, fits, readable

__all__ = ["CHUNK", "Native", "NotBuilt", "compiler", "fits", "loops", "needed", "readable", "use"]

_loops: Native | None = None


def use(native: Native | None) -> None:
    global _loops
    _loops = native


def loops() -> Native | None:
    return _loops


def needed() -> Native:
    """That library, for ops that cannot do without. Raises RuntimeError."""
    if _loops is None:
        raise RuntimeError("The C loops of this process have not been built: call vlaforge.graphs.native.native().")
    return _loops
