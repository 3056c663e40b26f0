"""Fused ops, one a file: formula, reference, Triton kernels, registration, public function, `KERNEL`.

    from vlaforge.kernels.rms_norm import rms_norm
    from vlaforge.kernels.spec import available, choices, use

`available()` finds the ops here; nothing lists them. See README.md for how to add one.
"""
