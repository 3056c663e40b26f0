"""What `torch.compile` must be told before its code for a CPU can be trusted, and is fast."""

from __future__ import annotations

import sys

SAFE = "-fno-tree-slp-vectorize"
"""With gcc 12.2, `-O3` and AVX-512, transposing 32 × 32 tiles of bf16 (`transpose_mxn`, also in a projection split into
three) goes wrong in nearly every element through the vectoriser of straight-line code. Inductor already turns gcc's
other vectoriser off; its own code has its vectors written out and loses nothing."""


def cpu_options() -> dict[str, bool | str]:
    """Inductor's settings, as `options` of `torch.compile`."""
    contract = "fast"  # a·b + c in one instruction and one rounding: twice as fast a polynomial (`kernels.gelu`)
    # Inductor has no setting for further flags. This one ends up in the middle of its command line, and in the keys of
    # its caches.
    flag = f"{contract} {SAFE}" if sys.platform == "linux" else contract
    # Layouts follow the model. In a graph with a convolution, inductor would keep whatever is [N, h, w, C] beside it
    # with h innermost, as if it were [N, C, h, w] in channels-last: transposed reads in every loop of DaViT.
    return {"cpp.enable_floating_point_contract_flag": flag, "layout_optimization": False}
