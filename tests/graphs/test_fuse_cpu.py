"""The CPU's table of `fuse`, wired into a family: X-VLA's convolutions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlaforge.graphs.native import native
from vlaforge.kernels.native import patches
from vlaforge.kernels.native.depthwise import is_depthwise
from vlaforge.models.towers.florence2 import ConvEmbed


class Ran(TorchDispatchMode):
    """What was called, with the shape of its first argument."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.calls.append((function.name().split("::")[-1], args[0].shape))
        return function(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


@pytest.fixture(scope="module")
def xvla(tiny_of):
    if native() is None:
        pytest.skip("no C compiler")
    return tiny_of("xvla")


def stepped(xvla, model):
    """(what ran in a forward and a backward, the loss)."""
    minibatch = xvla.batch(3)
    with Ran() as ran:
        loss = model(minibatch.batch, minibatch.draw).total()
        loss.backward()
    return ran, loss.detach()


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_depthwise_convolution_of_davit_runs_in_the_native_loop(xvla, remat, dtype):
    plain, model = xvla.model(), xvla.model()
    shared = ("precision", "remat") if remat != "none" else ("precision",)
    xvla.only(plain, *shared, dtype=dtype, remat=remat).lower(plain)
    plan = xvla.only(model, "fuse", *shared, dtype=dtype, remat=remat)
    found = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and is_depthwise(m)}
    assert {site.path for site in plan.entry("fuse").sites if site.what == "depthwise"} == found
    assert f"depthwise ×{len(found)}" in plan.text()
    plan.lower(model)
    (usual, want), (ran, got) = (stepped(xvla, each) for each in (plain, model))
    assert ran.count("depthwise") >= len(found) and ran.count("depthwise_backward") == len(found)
    assert usual.count("convolution_backward") - ran.count("convolution_backward") == len(found)
    alike(plain, model, want, got, rtol=1e-5 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_embeddings_of_many_weights_run_as_products_of_patches(xvla, dtype, monkeypatch):
    monkeypatch.setattr(patches, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(patches, "PLACES", 10**9)
    plain, model = xvla.model(), xvla.model()
    xvla.only(plain, "precision", dtype=dtype).lower(plain)
    plan = xvla.only(model, "fuse", "precision", dtype=dtype)
    found = {name for name, module in model.named_modules() if isinstance(module, ConvEmbed)}
    assert {site.path for site in plan.entry("fuse").sites if site.what == "convolution"} == found
    plan.lower(model)
    (usual, want), (ran, got) = (stepped(xvla, each) for each in (plain, model))
    assert ran.count("patches") == len(found) and not ran.count("convolution")
    assert usual.count("convolution_backward") > ran.count("convolution_backward")
    alike(plain, model, want, got, rtol=1e-5 if dtype == "fp32" else 2e-2)


def alike(plain: nn.Module, model: nn.Module, want: torch.Tensor, got: torch.Tensor, rtol: float) -> None:
    """Losses and gradients."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)
    total = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    for (name, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None), name
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).norm() <= 10 * rtol * theirs.grad.norm() + rtol * total, name
