"""What runs on a CPU in place of torch's own products and attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vlaforge.data.statistics import cache_folder
from vlaforge.kernels import cpu, native


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def test_products_of_any_strides_and_their_gradients():
    x, weight, bias = normal(3, 5, 7, seed=0), normal(6, 7, seed=1), normal(6, seed=2)
    grad = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    want = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), grad)
    y = cpu.Products(onednn=True).linear(x, weight, bias)
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    for a, b in zip(torch.autograd.grad(y, (x, weight, bias), grad), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def loops():
    if native.compiler() is None:
        pytest.skip("no C compiler")
    return native.Native(cache_folder() / "native")


def test_tiled_linear_is_linear_in_bf16(monkeypatch, loops):
    """Values and gradients in bf16, for shapes that transpose and shapes that do not, and a gradient with gaps."""
    given = []
    monkeypatch.setattr(native, "_loops", SimpleNamespace(transposed=lambda x: given.append(x) or loops.transposed(x)))
    for rows, inner, outer in ((37, 45, 600), (37, 600, 45), (37, 45, 33), (2100, 16, 520)):
        x, weight = (
            normal(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate(((rows, inner), (outer, inner)))
        )
        bias = normal(outer, seed=2, dtype=torch.bfloat16)
        grad = normal(outer, rows, seed=3, dtype=torch.bfloat16).detach().T
        want = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), grad)
        y = cpu.Products(tiles=True).linear(x[None], weight, bias)
        assert torch.equal(y[0], F.linear(x, weight, bias))
        for a, b in zip(torch.autograd.grad(y, (x, weight, bias), grad[None]), want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert [tuple(x.shape) for x in given] == [(37, 600), (37, 45)]
    gradient = torch.ops.vlaforge_cpu.weight_gradient.default
    torch.library.opcheck(gradient, (grad, x.detach()), test_utils=("test_schema", "test_faketensor"))


def test_widened_linear_rounds_once():
    """Values and gradients are those of fp64 rounded to bf16, to a unit in the last place."""
    x, weight, bias = (normal(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate(((2, 9, 45), (33, 45), (33,))))
    grad = normal(2, 33, 9, seed=3, dtype=torch.bfloat16).detach().transpose(1, 2)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    exact = F.linear(*wide)
    y = cpu.Products(widened=True).linear(x, weight, bias)
    want = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for a, b in zip([y, *torch.autograd.grad(y, (x, weight, bias), grad)], want, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (70, 45), (129, 64), (8, 200)])
def test_transposed(loops, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(loops.transposed(x), x.T)


def test_onednn_is_never_given_rows_with_gaps():
    """It would take some hundred times as long for a part of a packed product."""
    given = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_linear_pointwise" in function.name():
                given.append(args[1])
            return function(*args, **(kwargs or {}))

    a, packed = torch.randn(6, 4), torch.randn(5, 12)
    for b in (packed[:, 4:8], torch.randn(4, 9)[:, :5].T, packed[:, :4].contiguous(), torch.randn(4, 5).T):
        with Seen():
            got = cpu._onednn(a, b)
        torch.testing.assert_close(got, a @ b.T)
    assert len(given) == 4 and all(b.is_contiguous() or b.T.is_contiguous() for b in given)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("heads,groups", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_sdpas(heads, groups, masked, onednn):
    """Values and gradients, with query heads that share keys, and keys that are padding in one sample of two."""
    q = normal(2, heads, 5, 8, seed=0)
    k, v = normal(2, groups, 9, 8, seed=1), normal(2, groups, 9, 8, seed=2)
    keys = torch.arange(9) < torch.tensor([[9], [4]]) if masked else None
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(3))
    allowed = None if keys is None else keys[:, None, None]
    wide = [x.repeat_interleave(heads // groups, dim=1) for x in (k, v)]
    want = F.scaled_dot_product_attention(q, *wide, allowed, scale=0.3)
    got = cpu.attention(q, k, v, keys, 0.3, onednn)
    torch.testing.assert_close(got, want)
    grads = torch.autograd.grad(want, (q, k, v), grad)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), grad), grads, strict=True):
        torch.testing.assert_close(a, b)
    if masked:
        assert not torch.autograd.grad(cpu.attention(q, k, v, keys, 0.3, onednn).sum(), v)[0][1, :, 4:].any()


def test_attention_in_bf16_stays_within_its_rounding():
    low = [normal(2, n, t, 16, seed=n + t, dtype=torch.bfloat16) for n, t in ((4, 6), (1, 7), (1, 8))]
    q, k, v = low[0], low[1], low[2][:, :, :7]
    exact = F.scaled_dot_product_attention(q.double(), *(x.double().expand(-1, 4, -1, -1) for x in (k, v)), scale=0.25)
    got = cpu.attention(q, k, v, None, 0.25)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2e-2, atol=2e-2)


def test_attention_under_the_compiler():
    """As an op of its own: traced whole, with the strides that it says it has."""
    q, k, v = normal(2, 4, 5, 8, seed=0), normal(2, 1, 9, 8, seed=1), normal(2, 1, 9, 8, seed=2)
    keys = torch.arange(9) < torch.tensor([[9], [4]])
    flat = [q.detach().reshape(2, 20, 8), k.detach()[:, 0], v.detach()[:, 0]]
    out, p = cpu.ATTENTION(*flat, keys, 0.3, True)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(cpu.ATTENTION, (*flat, keys, 0.3, False), test_utils=checks)
    backward = torch.ops.vlaforge_cpu.attention_backward.default
    torch.library.opcheck(backward, (torch.ones_like(out), *flat, p, 0.3, True), test_utils=checks)
    torch.library.opcheck(backward, (torch.ones_like(out), *flat, p, 0.3, False), test_utils=checks)
