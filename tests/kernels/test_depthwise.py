"""The depthwise convolution of a CPU against torch's own, and both against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.graphs.native import native
from vlaforge.kernels.native.depthwise import depthwise, is_depthwise, takes

SHAPES = [(2, 64, 56, 56), (1, 256, 14, 14), (3, 512, 7, 7), (2, 5, 3, 4), (1, 1, 1, 1), (2, 83, 19, 2), (2, 16, 2, 1)]
"""[N, C, H, W]: DaViT's; fewer channels than a vector, a rest of channels, a last band of rows, one column."""


@pytest.fixture(autouse=True)
def loops():
    if native() is None:
        pytest.skip("no C compiler")


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """([x, weight, bias], gradient of y)."""
    generator = torch.Generator().manual_seed(sum(shape))
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    weight, bias = torch.randn(shape[1], 1, 3, 3, generator=generator), torch.randn(shape[1], generator=generator)
    last = [value.to(dtype, memory_format=torch.channels_last) for value in (x, grad)]
    return [value.requires_grad_() for value in (last[0], weight.to(dtype), bias.to(dtype))], last[1]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1, groups=len(weight))


def all_of(function, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    """[y, gradients]."""
    y = function(*given)
    return [y.detach(), *torch.autograd.grad(y, [value for value in given if value is not None], grad)]


@pytest.mark.parametrize("dtype,eps", [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype, eps):
    """No further from fp64 than torch's own, or than one rounding and, in fp32, a few of sums."""
    given, grad = inputs(shape, dtype)
    exact = all_of(plain, [value.detach().double().requires_grad_() for value in given], grad.double())
    here, torchs = all_of(depthwise, given, grad), all_of(plain, given, grad)
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in here[:2])
    for got, usual, want in zip(here, torchs, exact, strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        ours, theirs = ((value.double() - want).abs().max() for value in (got, usual))
        assert ours <= max(theirs, 4 * eps * want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype):
    given, grad = inputs((3, 70, 21, 9), dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(all_of(depthwise, given, grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_without_bias_or_with_frozen_weights():
    (x, weight, bias), grad = inputs((2, 40, 9, 6))
    for given in ([x, weight, None], [x, weight.detach(), bias.detach()], [x.detach(), weight, bias]):
        wanted = [value for value in given if value is not None and value.requires_grad]
        want, got = (torch.autograd.grad(function(*given), wanted, grad) for function in (plain, depthwise))
        torch.testing.assert_close(got, want)


def test_what_is_not_finite_spreads_to_its_neighbours_alone():
    (x, weight, bias), _ = inputs((1, 20, 12, 12), torch.bfloat16)
    x = x.detach().clone(memory_format=torch.preserve_format)
    x[0, 3, 0, 0], x[0, 17, 11, 5] = float("inf"), float("nan")
    got, want = depthwise(x, weight, bias), plain(x, weight, bias)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert got.isnan().sum() == 6 and got.isinf().sum() == 4


def test_nothing_in_gives_nothing_out():
    for shape in ((0, 3, 4, 4), (2, 3, 4, 0), (2, 3, 0, 4)):
        given, grad = inputs(shape)
        y, dx, dweight, dbias = all_of(depthwise, given, grad)
        assert y.shape == dx.shape == shape and not dweight.any() and not dbias.any()


def test_any_strides_are_taken():
    given, grad = inputs((2, 24, 10, 8))
    ((x, weight, bias), want) = given, all_of(depthwise, given, grad)
    odd = torch.cat([weight, weight], 1)[:, :1].detach().requires_grad_()
    for got, value in zip(all_of(depthwise, [x.contiguous(), odd, bias], grad.contiguous()), want, strict=True):
        assert torch.equal(got, value)


def test_registration():
    ((x, weight, bias), grad) = inputs((2, 24, 10, 8))
    ops = torch.ops.vlaforge_cpu
    given = [value.detach() for value in (x, weight, bias)]
    checks = ("test_schema", "test_faketensor")
    for arguments in (given, [*given[:2], None], [given[0].contiguous(), *given[1:]]):
        torch.library.opcheck(ops.depthwise.default, arguments, test_utils=checks)
    torch.library.opcheck(ops.depthwise_backward.default, (grad, *given[:2]), test_utils=checks)


def test_under_the_compiler():
    """Whole, in the way that DaViT calls it, forward and backward."""

    def half(x_NhwC: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x_NhwC) + depthwise(F.gelu(x_NhwC).permute(0, 3, 1, 2), weight, bias).permute(0, 2, 3, 1)

    given, grad = inputs((2, 24, 10, 8))
    given[0] = given[0].detach().permute(0, 2, 3, 1).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(half, fullgraph=True)
    want, got = (all_of(function, given, grad.permute(0, 2, 3, 1)) for function in (half, compiled))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 4, 3, 2, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4),
        nn.Conv2d(4, 4, 5, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, padding_mode="reflect"),
    ],
    ids=str,
)
def test_other_convolutions_are_left_alone(conv):
    assert not is_depthwise(conv) and is_depthwise(nn.Conv2d(4, 4, 3, padding=1, groups=4))


def test_other_inputs_are_left_to_torch():
    ((x, weight, _), _) = inputs((2, 24, 10, 8))
    assert takes(x, weight)
    assert not any(
        takes(*pair) for pair in ((x.contiguous(), weight), (x.double(), weight.double()), (x, weight.half()))
    )
    assert not takes(x[0], weight)
