"""Code that `torch.compile` makes for a CPU."""

from __future__ import annotations

import torch

from vlaforge.kernels.compiler import SAFE, make_safe


def three_parts(x_TD: torch.Tensor) -> list[torch.Tensor]:
    return [part_TW.t().contiguous() for part_TW in x_TD.split(64, dim=1)]


def test_a_projection_split_in_three():
    """Nearly every element was wrong where gcc 12.2 vectorised the transposition of bf16 tiles."""
    make_safe()
    make_safe()
    from torch._inductor import config

    assert config.cpp.enable_floating_point_contract_flag.count(SAFE) <= 1
    x = torch.randn(12544, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    for ours, eager in zip(torch.compile(three_parts, dynamic=False)(x), three_parts(x), strict=True):
        assert torch.equal(ours, eager)
