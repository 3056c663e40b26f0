"""Attention in bf16 by the tiles of a CPU, against fp64 and against the two products that it replaces."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vlaforge.data.statistics import cache_folder
from vlaforge.graphs.passes import fuse
from vlaforge.graphs.passes.remat import Recomputed
from vlaforge.kernels import cpu, native
from vlaforge.kernels.native import attention as tiled
from vlaforge.models.blocks.attention import Attention, Mask

ERROR = 6e-3
"""Of a norm: bf16 rounds by up to 3.9e-3, and by 1.7e-3 on average; few values sum few roundings."""


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    if native.compiler() is None:
        pytest.skip("no C compiler")
    built = native.Native(cache_folder() / "native")
    monkeypatch.setattr(native, "_loops", built)
    if not built.has_tiles:
        pytest.skip("no tiles")


def heads(*shape: int, seed: int) -> Tensor:
    """[B, H, T, K] in [B, T, H, K] memory."""
    b, h, t, k = shape
    return torch.randn((b, t, h, k), generator=torch.Generator().manual_seed(seed)).bfloat16().transpose(1, 2)


def given(b: int, h: int, g: int, t: int, s: int, k: int) -> tuple[Tensor, ...]:
    """q, k, v that want gradients, and the gradient of the output."""
    shapes = ((b, h, t, k), (b, g, s, k), (b, g, s, k), (b, h, t, k))
    *inputs, grad = (heads(*shape, seed=i) for i, shape in enumerate(shapes))
    return *(x.requires_grad_() for x in inputs), grad


def exact(q: Tensor, k: Tensor, v: Tensor, keys_BS, bias_S, scale: float, causal: bool) -> Tensor:
    """The formula in the dtype of its inputs; queries that see nothing mix to zeros, or all alike if not `causal`."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    seen = torch.ones_like(scores, dtype=torch.bool)
    if keys_BS is not None:
        seen &= keys_BS[:, None, None]
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    if bias_S is not None:
        scores = scores + bias_S.to(scores.dtype)
    p = scores.masked_fill(~seen, -1e300).softmax(-1)
    nothing = ~seen.any(-1, keepdim=True)
    return torch.where(nothing, 0.0 if causal else 1 / k.shape[2], p) @ v


def results(function, inputs: tuple[Tensor, ...], grad: Tensor, *rest) -> list[Tensor]:
    """Output and gradients."""
    out = function(*inputs, *rest)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def in_fp64(inputs: tuple[Tensor, ...], grad: Tensor, *rest) -> list[Tensor]:
    return results(exact, tuple(x.detach().double().requires_grad_() for x in inputs), grad.double(), *rest)


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(got, want, strict=True)]


SHAPES = {  # samples, query heads, key heads, queries, keys, width
    "windows": (3, 4, 4, 144, 144, 32),
    "policy": (1, 2, 2, 30, 276, 64),
    "text": (1, 2, 2, 114, 114, 64),
    "world": (2, 3, 3, 72, 34, 128),
    "vision": (1, 3, 3, 96, 96, 72),
    "shared keys": (2, 8, 1, 50, 203, 256),
    "half shared": (2, 6, 2, 33, 47, 36),
    "odd": (1, 2, 1, 5, 7, 3),
    "one": (2, 2, 2, 1, 1, 8),
    "chunks": (1, 4, 1, 300, 500, 200),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients(shape, masked):
    """Near fp64, and nearer than two products around a softmax."""
    *inputs, grad = given(*shape)
    s, scale = shape[4], shape[5] ** -0.5
    keys = torch.arange(s) < torch.linspace(s // 2 + 1, s, shape[0]).long()[:, None] if masked else None
    want = in_fp64(inputs, grad, keys, None, scale, False)
    got = errors(results(tiled.attention, inputs, grad, keys, None, scale), want)
    usual = errors(results(cpu.attention, inputs, grad, keys, scale), want)
    if shape[4] > 1:  # the gradients of one score are zero
        assert max(got) < ERROR
        assert all(a <= b + 1e-3 for a, b in zip(got, usual, strict=True))
    assert got[0] < ERROR and got[3] < ERROR


@pytest.mark.parametrize("t,s", [(50, 50), (37, 90), (37, 30), (300, 300), (5, 5)])
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_causal(t, s, groups, masked):
    """Queries at the front may see nothing, by causality or since keys before them are padding."""
    *inputs, grad = given(2, 4, groups, t, s, 40)
    keys = torch.rand((2, s), generator=torch.Generator().manual_seed(4)) > 0.5 if masked else None
    if masked:
        keys[0] = False
    want = in_fp64(inputs, grad, keys, None, 0.15, True)
    got = results(tiled.attention, inputs, grad, keys, None, 0.15, True)
    assert max(errors(got, want)) < ERROR
    assert all(x.isfinite().all() for x in got)
    assert not got[0][want[0] == 0].any()


def test_a_bias_of_keys():
    """Also as what it is for: one key that stands for several."""
    *inputs, grad = given(2, 3, 3, 24, 34, 128)
    bias = torch.randn(34, generator=torch.Generator().manual_seed(5))
    keys = torch.arange(34) % 3 > torch.tensor([[0], [-1]])
    for valid in (None, keys):
        want = in_fp64(inputs, grad, valid, bias, 0.1, False)
        assert max(errors(results(tiled.attention, inputs, grad, valid, bias, 0.1), want)) < ERROR
    q, k, v = (x.detach() for x in inputs)
    many = [torch.cat([x, x[:, :, -1:].expand(-1, -1, 6, -1)], 2) for x in (k, v)]
    once = torch.tensor([0.0] * 33 + [math.log(7)])
    together = tiled.attention(q, *many, None, None, 0.1)
    torch.testing.assert_close(tiled.attention(q, k, v, None, once, 0.1), together, rtol=1e-2, atol=4e-3)


def test_what_is_masked_is_not_read():
    """NaN there changes nothing, bit for bit, and its gradients are zero."""
    *inputs, grad = given(2, 4, 2, 40, 70, 32)
    keys = torch.rand((2, 70), generator=torch.Generator().manual_seed(6)) > 0.4
    clean = results(tiled.attention, inputs, grad, keys, None, 0.2)
    q, *shared = (x.detach().clone() for x in inputs)
    for x in shared:
        x.transpose(1, 2)[~keys] = math.nan
    dirty = results(tiled.attention, tuple(x.requires_grad_() for x in (q, *shared)), grad, keys, None, 0.2)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    assert not any(x.transpose(1, 2)[~keys].any() for x in dirty[2:])


def test_a_sample_without_keys_mixes_all_of_them():
    *inputs, grad = given(2, 4, 2, 20, 37, 32)
    keys = torch.arange(37) < torch.tensor([[0], [30]])
    bias = torch.linspace(-3, 3, 37)
    got = results(tiled.attention, inputs, grad, keys, bias, 0.2)
    want = inputs[2].detach()[0].double().mean(1).repeat_interleave(2, 0)[:, None].expand(-1, 20, -1)
    assert errors([got[0][0]], [want])[0] < ERROR
    assert not got[1][0].any() and not got[2][0].any()
    assert errors(got[3:], in_fp64(inputs, grad, keys, bias, 0.2, False)[3:])[0] < ERROR


def test_nan_and_infinity_come_out():
    """A step with a broken activation must be seen as such."""
    for bad in (math.nan, math.inf):
        q, k, v = (x.detach().clone() for x in given(1, 2, 2, 20, 40, 32)[:3])
        k[0, 1, 39, 3] = bad
        out = tiled.attention(q, k, v, None, None, 0.2)
        broken = ~out.isfinite().any(-1)
        assert not broken[0, 0].any()
        assert torch.equal(broken[0, 1], (q[0, 1, :, 3] > 0) | math.isnan(bad))  # a score of -inf weighs nothing


@pytest.mark.parametrize("width", [32, 40])
def test_any_strides(width):
    """Parts of a packed projection, a gradient that is spread out or transposed: bitwise what copies give."""
    packed = torch.randn((2, 50, 3, 4, width), generator=torch.Generator().manual_seed(7)).bfloat16()
    q, k, v = (x.requires_grad_() for x in packed.permute(2, 0, 3, 1, 4).unbind(0))
    assert not q.is_contiguous() and tiled.serves(q, k, v)
    for grad in (
        torch.ones(1).bfloat16().expand(q.shape),
        heads(2, 4, width, 50, seed=8).transpose(2, 3),
        heads(2, 4, 50, 2 * width, seed=8)[..., width:],
    ):
        got = results(tiled.attention, (q, k, v), grad, None, None, 0.2)
        copies = tuple(x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v))
        for a, b in zip(got, results(tiled.attention, copies, grad.contiguous(), None, None, 0.2), strict=True):
            assert torch.equal(a, b)
    assert got[0].transpose(1, 2).is_contiguous()
    assert not tiled.serves(q.mT, k, v) and not tiled.serves(q.float(), k, v)


@pytest.mark.parametrize("shape", [(3, 4, 4, 50, 60, 32), (1, 8, 1, 150, 260, 64), (2, 3, 1, 37, 45, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_threads_change_nothing(shape, causal):
    """Whether each takes a problem or all share one."""
    *inputs, grad = given(*shape)
    keys = torch.arange(shape[4]) < torch.linspace(shape[4] // 2, shape[4], shape[0]).long()[:, None]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(tiled.attention, inputs, grad, keys, None, 0.2, causal))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_the_log_sum_exp_is_fp32s():
    """Base 2. What the exponential and the logarithm of the loops cost shows here."""
    q, k, v = (x.detach() for x in given(1, 2, 2, 32, 300, 64)[:3])
    got = tiled.ATTENTION(3 * q, k, v, None, None, 0.5, False)[1]
    want = ((3 * q).double() @ k.double().mT * 0.5).logsumexp(-1) / math.log(2)
    torch.testing.assert_close(got.double(), want, rtol=5e-7, atol=1e-6)


def test_empty():
    for t, s in ((0, 5), (5, 0)):
        *inputs, grad = given(2, 4, 2, t, s, 8)
        assert not any(x.any() for x in results(tiled.attention, inputs, grad, None, None, 0.2))


def test_the_ops_are_what_they_say():
    q, k, v, grad = (x.detach() for x in given(2, 4, 2, 20, 37, 32))
    keys, bias = torch.arange(37) < torch.tensor([[37], [30]]), torch.linspace(-1, 1, 37)
    checks = ("test_schema", "test_faketensor")
    lse = tiled.ATTENTION(q, k, v, keys, bias, 0.2, False)[1]
    for rest in ((keys, bias, 0.2, False), (None, None, 0.2, True)):
        torch.library.opcheck(tiled.ATTENTION, (q, k, v, *rest), test_utils=checks)
        backward = torch.ops.vlaforge_cpu.tiled_attention_backward.default
        torch.library.opcheck(backward, (grad, q, k, v, lse, *rest), test_utils=checks)


class Ran(TorchDispatchMode):
    """Names of the ops of attention that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "attention" in function.name():
            self.names.append(function.name().split("::")[1].split(".")[0])
        return function(*args, **(kwargs or {}))


def test_fuse_sends_to_the_tiles_what_they_serve():
    module = Attention()
    module.forward, module.tiles, module.onednn = fuse.product_attention.__get__(module), True, False
    q, k, v = (x.detach() for x in given(2, 4, 2, 20, 20, 32)[:3])
    keys = torch.arange(20) < torch.tensor([[20], [15]])
    masks = (None, Mask.padding(keys), Mask.causal(), Mask.causal_padding(keys), Mask.weighted(torch.zeros(20)))
    for mask in masks:
        with Ran() as ran:
            got = module(q, k, v, mask)
        assert ran.names == ["tiled_attention"]
        torch.testing.assert_close(got, Attention.forward(module, q, k, v, mask), rtol=2e-2, atol=2e-2)
    for mask, x in ((Mask.segments(torch.zeros(2, 20)), q), (None, q.contiguous().mT.contiguous().mT)):
        with Ran() as ran:
            module(x, k, v, mask)
        assert "tiled_attention" not in ran.names


@pytest.mark.parametrize("selective", [True, False])
def test_recompute_keeps_what_it_is_told_to(selective):
    """`selective` runs the forward once, `full` twice; the gradients are the same, bit for bit."""
    *inputs, grad = given(1, 2, 2, 20, 37, 32)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tiled.attention(2 * q, k, v, None, None, 0.2)

    want = torch.autograd.grad(block(*inputs), inputs, grad)
    with Ran() as ran:
        got = torch.autograd.grad(Recomputed(block, selective)(*inputs), inputs, grad)
    assert ran.names.count("tiled_attention") == (1 if selective else 2)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_it_compiles():
    class Mixed(nn.Module):
        def forward(self, packed: Tensor) -> Tensor:
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
            return tiled.attention(q * 2, k, v, None, None, 0.2).transpose(1, 2).flatten(2) * 3

    x = torch.randn((2, 20, 3, 4, 32), generator=torch.Generator().manual_seed(9)).bfloat16().requires_grad_()
    want, got = Mixed()(x), torch.compile(Mixed(), fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
