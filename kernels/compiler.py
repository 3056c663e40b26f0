"""What `torch.compile` must be told before its code for a CPU can be trusted."""

from __future__ import annotations

import sys

SAFE = "-fno-tree-slp-vectorize"
"""With gcc 12.2, `-O3` and AVX-512, transposing 32 × 32 tiles of bf16 (`transpose_mxn`, also in a projection split into
three) goes wrong in nearly every element through the vectoriser of straight-line code. Inductor already turns gcc's
other vectoriser off; its own code has its vectors written out and loses nothing."""


def make_safe() -> None:
    """Has inductor pass `SAFE` to the C++ compiler. To be called before anything is compiled; again does nothing."""
    if sys.platform != "linux":
        return
    from torch._inductor import config

    # Inductor has no setting for further flags. This one ends up in the middle of its command line, and in the keys of
    # its caches.
    flag = config.cpp.enable_floating_point_contract_flag
    if SAFE not in flag:
        config.cpp.enable_floating_point_contract_flag = f"{flag} {SAFE}"
