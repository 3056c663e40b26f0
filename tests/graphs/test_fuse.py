"""The kernels' table of `fuse`, wired into every family: on this device each op runs its own reference."""

from __future__ import annotations

import torch

from vlaforge.graphs import PlanOptions, make_plan, registry
from vlaforge.graphs.passes import fuse as fuse_pass
from vlaforge.kernels.spec import choices

OP = {"ada_layer_norm": "ada_norm"}
"""Kernel of a site, where their names differ."""


def fused(tiny):
    """(a model lowered by `fuse` alone, for a GPU; its plan's entry)."""
    model = tiny.model()
    others = tuple(rule.name for rule in registry() if rule.name != "fuse")
    plan = make_plan(model, tiny.contract, PlanOptions(device="h200", without=others))
    plan.lower(model)
    return model, plan.entry("fuse")


def test_every_family_runs_through_the_kernels_of_its_plan(tiny):
    plain = tiny.model()
    model, entry = fused(tiny)
    minibatch = tiny.batch(3)
    before = choices()
    losses = [m(minibatch.batch, minibatch.draw).total() for m in (plain, model)]
    ran = {key[0] for key, count in choices().items() if count > before.get(key, 0)}
    assert ran == {OP.get(site.what, site.what) for site in entry.sites}
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for loss in losses:
        loss.backward()
    total = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), name
        if want.grad is not None:
            assert (got.grad - want.grad).norm() <= 1e-4 * want.grad.norm() + 1e-6 * total, name


def test_no_block_of_the_table_is_left_out(tiny):
    """Every module of a class in the table is a site, and its replaced method is the kernel's."""
    model, entry = fused(tiny)
    swaps = {swap.block: swap for swap in fuse_pass.CUDA_TABLE}
    paths = {site.path for site in entry.sites}
    for name, module in model.named_modules():
        if type(module) in swaps:
            swap = swaps[type(module)]
            assert name in paths
            assert getattr(module, swap.method).__func__ is swap.function
