"""Convolutions as products of patches, against torch's own and fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vlaforge.graphs.native import native
from vlaforge.kernels.cpu import Products
from vlaforge.kernels.native.patches import convolution, may_pay, pays

KINDS = [(256, 512, 3, 2, 1, 14, 14), (5, 7, 3, 2, 1, 9, 6), (3, 4, 7, 4, 3, 17, 12), (6, 2, 2, 3, 0, 8, 5)]
"""Channels in and out, kernel, stride, padding, rows and columns: X-VLA's last stage and odd ones."""


@pytest.fixture(autouse=True)
def loops():
    if native() is None:
        pytest.skip("no C compiler")


def example(kind: tuple[int, ...], dtype: torch.dtype) -> tuple[nn.Conv2d, Tensor, Tensor]:
    inner, outer, kernel, stride, padding, height, width = kind
    torch.manual_seed(0)
    conv = nn.Conv2d(inner, outer, kernel, stride, padding).to(dtype)
    x = torch.randn(2, height, width, inner).to(dtype).requires_grad_()
    return conv, x, torch.randn(plain(conv, x).shape).to(dtype)


def plain(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return convolution(conv, x, Products())


def all_of(function, conv: nn.Conv2d, x: Tensor, grad: Tensor) -> list[Tensor]:
    y = function(conv, x)
    return [y.detach(), *torch.autograd.grad(y, (x, conv.weight, conv.bias), grad)]


def widened(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return convolution(conv, x, Products(widened=True))


@pytest.mark.parametrize(
    "product,dtype,eps",
    [(product, torch.float32, 2**-24), (product, torch.bfloat16, 2**-9), (widened, torch.bfloat16, 2**-9)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, product, dtype, eps):
    """No further from fp64 than torch's own, or than one rounding and, in fp32, a few of sums."""
    conv, x, grad = example(kind, dtype)
    here, torchs = (all_of(function, conv, x, grad) for function in (product, plain))
    exact = all_of(plain, conv.double(), x.detach().double().requires_grad_(), grad.double())
    for got, usual, want in zip(here, torchs, exact, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        ours, theirs = ((value.double() - want).abs().max() for value in (got, usual))
        assert ours <= max(theirs, 8 * eps * want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_patch(dtype):
    _, x, _ = example(KINDS[1], dtype)
    threads = torch.get_num_threads()
    ops, results = torch.ops.vlaforge_cpu, []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            patches = ops.patches(x.detach(), 3, 2, 1)
            results.append((patches, ops.patches_backward(patches.float(), x.shape, 3, 2, 1)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_without_bias_or_with_frozen_parts():
    for dtype in (torch.float32, torch.bfloat16):
        conv, x, grad = example(KINDS[1], dtype)
        conv.bias = None
        for frozen in (x, conv.weight):
            frozen.requires_grad_(False)
            wanted = [value for value in (x, conv.weight) if value.requires_grad]
            got, want = (torch.autograd.grad(function(conv, x), wanted, grad) for function in (product, plain))
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
            frozen.requires_grad_(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_registration_and_the_compiler(dtype):
    conv, x, grad = example(KINDS[1], dtype)
    ops, checks = torch.ops.vlaforge_cpu, ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.patches.default, (x.detach(), 3, 2, 1), test_utils=checks)
    patches = ops.patches(x.detach(), 3, 2, 1).float()
    torch.library.opcheck(ops.patches_backward.default, (patches, list(x.shape), 3, 2, 1), test_utils=checks)
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True)
    want, got = (all_of(function, conv, x, grad) for function in (product, compiled))
    torch.testing.assert_close(got, want)


def test_where_it_is_taken():
    """Few places for many weights; nothing that it does not compute."""
    conv = nn.Conv2d(256, 512, 3, 2, 1)
    assert may_pay(conv) and not may_pay(nn.Conv2d(128, 256, 3, 2, 1))
    others = [
        nn.Conv2d(512, 512, 3, 2, 1, groups=2),
        nn.Conv2d(256, 512, (3, 5), 2, 1),
        nn.Conv2d(256, 512, 3, 2, 1, dilation=2),
        nn.Conv2d(256, 512, 3, 2, 1, padding_mode="reflect"),
        nn.Conv2d(256, 512, 3, padding="same"),
    ]
    assert not any(may_pay(other) for other in others)
    assert pays(conv, torch.empty(4, 14, 14, 256)) and not pays(conv, torch.empty(4, 56, 56, 256))
    assert not pays(conv, torch.empty(4, 14, 14, 256, dtype=torch.float64))
