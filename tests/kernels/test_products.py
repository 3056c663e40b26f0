"""fp32 products on tiles against fp64 and the library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.graphs.native import native
from vlaforge.kernels import cpu
from vlaforge.kernels.native import products

needs_tiles = pytest.mark.skipif(
    native() is None or not native().has_tiles, reason="needs AMX tiles and a C compiler that knows them"
)
SHAPES = [(1, 1, 1), (33, 17, 65), (64, 64, 32), (70, 300, 1100), (600, 40, 530), (31, 129, 513), (1, 200, 300)]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(result: Tensor, exact: Tensor) -> float:
    return ((result - exact).abs().max() / exact.abs().max()).item()


@needs_tiles
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
def test_as_exact_as_fp32(shape, turned):
    """Each layout of both factors, edges of tiles in every axis, more than one piece of the summed axis."""
    m, n, k = shape
    a = normal(k, m, seed=0).t() if turned[0] else normal(m, k, seed=0)
    b = normal(n, k, seed=1).t() if turned[1] else normal(k, n, seed=1)
    bias = normal(n, seed=2)
    for extra in (None, bias):
        exact = a.double() @ b.double() + (0 if extra is None else extra.double())
        got = products.product(native(), a, b, extra)
        plain = a @ b if extra is None else torch.addmm(extra, a, b)
        assert got.shape == (m, n)
        assert error(got, exact) <= max(error(plain, exact), 3e-7)


@needs_tiles
def test_gaps_threads_and_scales(monkeypatch):
    wide = normal(100, 300, seed=0)
    a, b = wide[:, 20:150], normal(260, 90, seed=1)[::2]
    assert error(products.product(native(), a, b), a.double() @ b.double()) < 5e-7
    a, b = normal(100, 520, seed=2), normal(520, 170, seed=3)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        results.append(products.product(native(), a, b))
    assert all(torch.equal(results[0], other) for other in results[1:])
    for scale in (1e-25, 1e15):  # far from 1, and columns that differ by many orders
        scales = torch.logspace(-6, 6, 170) * scale
        assert error(products.product(native(), a, b * scales) / scales, a.double() @ b.double()) < 5e-7


@needs_tiles
@pytest.mark.parametrize("odd", [0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0x7F800000, 0xFF800000])
def test_what_is_not_finite_stays_so(odd):
    """Bits of NaN and infinity: in the row and column that they belong to, and nowhere else."""
    value = torch.tensor([odd]).to(torch.int32).view(torch.float32)[0]
    a, b = normal(70, 40, seed=0), normal(40, 50, seed=1)
    a[3, 7], b[11, 49] = value, value
    finite = torch.isfinite(products.product(native(), a, b))
    want = torch.ones(70, 50, dtype=torch.bool)
    want[3], want[:, 49] = False, False
    assert torch.equal(finite, want)


@needs_tiles
def test_linear_and_its_gradients():
    """Through shapes that pay and one that does not; no bias; a gradient with gaps; as an op that compiles."""
    for rows, inner, outer, bias in ((300, 256, 320, True), (300, 256, 320, False), (5, 8, 6, True)):
        x, weight = normal(2, rows, inner, seed=0).requires_grad_(), normal(outer, inner, seed=1).requires_grad_()
        shift = normal(outer, seed=2).requires_grad_() if bias else None
        grad = normal(2, outer, rows, seed=3).transpose(1, 2)
        given = (x, weight, shift) if bias else (x, weight)
        exact = F.linear(*(None if t is None else t.double() for t in (x, weight, shift)))
        wanted = torch.autograd.grad(exact, given, grad.double())
        y = cpu.Products(tiles=True).linear(x, weight, shift)
        assert error(y, exact) < 5e-7
        for ours, other in zip(torch.autograd.grad(y, given, grad), wanted, strict=True):
            assert error(ours, other) < 2e-6
    op = torch.ops.vlaforge_cpu.tile_product.default
    torch.library.opcheck(op, (normal(300, 256, seed=4), normal(256, 320, seed=5), None),
                          test_utils=("test_schema", "test_faketensor"))  # fmt: skip


def test_small_products_are_the_library_s(monkeypatch):
    monkeypatch.setattr(products, "product", lambda *_: pytest.fail("not worth tiles"))
    a, b, bias = normal(12, 30, seed=0), normal(30, 400, seed=1), normal(400, seed=2)
    assert torch.equal(torch.ops.vlaforge_cpu.tile_product(a, b, bias), torch.addmm(bias, a, b))
