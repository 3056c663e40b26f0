"""The CPU's table of `fuse`, wired into families: X-VLA's convolutions, products of all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlaforge.graphs.native import native
from vlaforge.graphs.passes import fuse
from vlaforge.kernels import cpu
from vlaforge.kernels.native import patches
from vlaforge.kernels.native.depthwise import is_depthwise
from vlaforge.models.towers.florence2 import ConvEmbed
from vlaforge.runtime.lora import LoraConfig, LoraLinear, inject


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


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


class LowProducts(TorchDispatchMode):
    """Products of bf16 that were called, forward and backward."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[-1].split(".")[0]
        if name.startswith(PRODUCTS) or "attention" in name:
            low = [x for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16]
            if low:
                self.found.append(f"{name} of {[tuple(x.shape) for x in low]}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [False, True])
def test_without_bf16_instructions_every_product_is_widened(tiny, packed, monkeypatch):
    monkeypatch.setattr(cpu, "widens", lambda: True)
    monkeypatch.setattr(fuse, "_tiles", lambda: False)
    plain, model = tiny.model(), tiny.model()
    shared = ("precision", "pack", "hoist") if packed else ("precision",)
    tiny.only(plain, *shared, dtype="bf16").lower(plain)
    tiny.only(model, "fuse", *shared, dtype="bf16").lower(model)
    minibatch = tiny.batch(3)
    want = plain(minibatch.batch, minibatch.draw).total()
    want.backward()
    with LowProducts() as low:
        got = model(minibatch.batch, minibatch.draw).total()
        got.backward()
    assert not low.found
    alike(plain, model, want.detach(), got.detach(), rtol=2e-2)


def test_the_weight_under_an_adapter_is_multiplied_like_any_other(tiny_of, monkeypatch):
    monkeypatch.setattr(cpu, "widens", lambda: True)
    monkeypatch.setattr(fuse, "_tiles", lambda: False)
    tiny = tiny_of("xvla")
    model = tiny.model()
    inject(model, LoraConfig(r=2, targets=("vision", "policy")))
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    assert adapted
    plan = tiny.only(model, "fuse", "precision", dtype="bf16")
    sites = {site.path: site.what for site in plan.entry("fuse").sites}
    assert {sites.get(name) for name in adapted} == {"linear"}
    plan.lower(model)
    minibatch = tiny.batch(3)
    with LowProducts() as low:
        model(minibatch.batch, minibatch.draw).total().backward()
    assert not low.found
