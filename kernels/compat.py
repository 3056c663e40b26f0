"""Triton, or a stand-in where it cannot be installed (macOS, Windows): kernels import but do not run."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    from types import SimpleNamespace

    HAS_TRITON = False
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=None)

__all__ = ["HAS_TRITON", "tl", "triton"]
