"""Shared blocks against their formulas, written out in plain float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vlaforge.models.blocks.attention import QKV, Mask, attention, merge_heads
from vlaforge.models.blocks.image import PrepareImages
from vlaforge.models.blocks.mlp import MLP, GatedMLP
from vlaforge.models.blocks.norms import AdaRMSNorm, RMSNorm
from vlaforge.models.blocks.padding import padded
from vlaforge.models.blocks.rotary import apply_rotary, rotary_table
from vlaforge.models.blocks.time import sincos_time


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain_attention(q, k, v, allowed_BTS, scale):
    """softmax over allowed keys, float64; rows that see nothing give zeros."""
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~allowed_BTS[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("kind", ["full", "padding", "causal", "causal_padding", "segments"])
def test_attention_is_the_masked_softmax(heads, groups, kind):
    b, t, s, k = 2, 5, 5 if kind == "segments" else 7, 8
    g = generator()
    q = torch.randn(b, heads, t, k, generator=g, requires_grad=True)
    key, value = (torch.randn(b, groups, s, k, generator=g, requires_grad=True) for _ in range(2))
    valid = torch.rand(b, s, generator=g) > 0.3
    valid[0], valid[1, 0] = True, True
    causal = torch.ones(t, s, dtype=torch.bool).tril(s - t)
    everything = torch.ones(b, t, s, dtype=torch.bool)
    numbers = torch.tensor([[0, 0, 1, 1, -1], [0, 1, 1, 2, 2]])
    same = (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, None]
    mask, allowed = {
        "full": (None, everything),
        "padding": (Mask.padding(valid), everything & valid[:, None]),
        "causal": (Mask.causal(), everything & causal),
        "causal_padding": (Mask.causal_padding(valid), everything & causal & valid[:, None]),
        "segments": (Mask.segments(numbers) if kind == "segments" else None, same if kind == "segments" else None),
    }[kind]
    out = attention(q, key, value, mask, scale=0.3)
    expected = plain_attention(q, key, value, allowed, 0.3)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn(expected.shape, generator=g, dtype=torch.float64)
    ours = torch.autograd.grad((out.double() * weight).sum(), (q, key, value))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, key, value))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_sample_without_valid_keys_mixes_to_zeros_and_has_finite_gradients(groups):
    g = generator(1)
    q = torch.randn(2, 4, 3, 8, generator=g, requires_grad=True)
    k, v = (torch.randn(2, groups, 6, 8, generator=g, requires_grad=True) for _ in range(2))
    valid = torch.tensor([[True] * 6, [False] * 6])
    out = attention(q, k, v, Mask.padding(valid))
    assert out[1].eq(0).all() and out[0].abs().sum() > 0
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_projections_give_heads_that_merge_back():
    qkv = QKV(16, heads=4, kv_heads=2, head_dim=8)
    x = torch.randn(2, 3, 16, generator=generator())
    q, k, v = qkv(x)
    assert q.shape == (2, 4, 3, 8) and k.shape == v.shape == (2, 2, 3, 8)
    torch.testing.assert_close(merge_heads(q), qkv.q_proj(x))
    for alone, joint in zip(qkv.keys(x), (k, v)):
        assert torch.equal(alone, joint)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    norm = RMSNorm(12, eps=1e-6, offset=offset)
    x = torch.randn(3, 5, 12, generator=generator()) * 7
    start = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x).double(), start, atol=1e-5, rtol=1e-5)  # fresh weights change nothing
    with torch.no_grad():
        norm.weight.normal_(generator=generator(1))
    torch.testing.assert_close(norm(x).double(), start * (offset + norm.weight.double()), atol=1e-5, rtol=1e-5)


def test_norms_compute_in_fp32_whatever_comes_in():
    norm = RMSNorm(64)
    x = torch.randn(4, 64, generator=generator()).bfloat16() * 100
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def test_ada_rms_norm_modulates_and_returns_the_gate():
    norm = AdaRMSNorm(6, condition=4)
    x, condition = torch.randn(2, 3, 6, generator=generator()), torch.randn(2, 4, generator=generator(1))
    fresh, _ = norm(x, condition)
    other, _ = norm(x, condition + 1)
    assert torch.equal(fresh, other)  # a fresh layer does not depend on the condition
    with torch.no_grad():
        norm.dense.weight.normal_(generator=generator(2))
    out, gate = norm(x, condition)
    scale, shift, expected_gate = norm.dense(condition)[:, None].double().chunk(3, -1)
    start = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out.double(), start * (1 + scale) + shift, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gate.double(), expected_gate)
    ahead = norm.modulate(x, norm.modulation(condition))
    assert torch.equal(ahead[0], out) and torch.equal(ahead[1], gate)


def test_rotary_turns_pairs_by_position_and_keeps_relative_angles():
    k, theta = 8, 100.0
    positions = torch.tensor([[0, 1, 5, 9]])
    cos, sin = rotary_table(positions, k, theta)
    angle = positions.numpy()[0][:, None] * theta ** (-np.arange(0, k, 2) / k)
    np.testing.assert_allclose(cos[0].numpy(), np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(sin[0].numpy(), np.sin(angle), atol=1e-6)
    x = torch.randn(1, 2, 4, k, generator=generator())
    turned = apply_rotary(x, cos, sin)
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones(4, 4).double(), torch.from_numpy(angle))
    torch.testing.assert_close(turned.double(), torch.cat([pairs.real, pairs.imag], -1), atol=1e-5, rtol=1e-5)
    later = apply_rotary(x, *rotary_table(positions + 37, k, theta))
    scores = [y[0, 0] @ y[0, 0].T for y in (turned, later)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


def test_rotary_reads_the_first_half_of_a_wide_table():
    x = torch.randn(2, 3, 4, 8, generator=generator())
    cos, sin = rotary_table(torch.arange(8).view(2, 4), 8)
    wide = apply_rotary(x, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    assert torch.equal(wide, apply_rotary(x, cos, sin))


def test_mlps():
    x = torch.randn(2, 3, 8, generator=generator())
    gated = GatedMLP(8, 16, "silu")
    expected = gated.down_proj(F.silu(gated.gate_proj(x)) * gated.up_proj(x))
    torch.testing.assert_close(gated(x), expected)
    mlp = MLP(8, 16, "gelu_tanh")
    hidden = mlp.fc1(x)
    cubic = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    torch.testing.assert_close(mlp(x), mlp.fc2(cubic), atol=1e-5, rtol=1e-5)


def test_sincos_time_holds_fp64_accuracy():
    time = np.array([0.001, 0.3333333, 1.0], dtype=np.float32)
    period = 4e-3 * (4.0 / 4e-3) ** np.linspace(0, 1, 32)
    angle = 2 * np.pi * time.astype(np.float64)[:, None] / period
    out = sincos_time(torch.from_numpy(time), 64, 4e-3, 4.0)
    np.testing.assert_allclose(out.numpy(), np.concatenate([np.sin(angle), np.cos(angle)], 1), atol=1e-6)
    with pytest.raises(ValueError, match="even"):
        sincos_time(torch.from_numpy(time), 63, 4e-3, 4.0)


def test_prepare_images_takes_raw_frames_and_ready_images():
    prepare = PrepareImages(8)
    frames = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8, generator=generator())
    ready = frames.permute(0, 1, 4, 2, 3).float() / 255 * 2 - 1
    torch.testing.assert_close(prepare(frames), ready.flatten(0, 1))
    assert torch.equal(prepare(ready), ready.flatten(0, 1))
    assert torch.equal(prepare(frames.float()), prepare(frames))  # cameras brought to one size without rounding
    wide = prepare(torch.full((1, 1, 8, 16, 3), 255, dtype=torch.uint8))
    assert wide[0, :, 2:6].eq(1).all() and wide[0, :, :2].eq(-1).all() and wide[0, :, 6:].eq(-1).all()
    with pytest.raises(ValueError, match="expected frames"):
        prepare(torch.zeros(1, 1, 3, 9, 9))


@pytest.mark.parametrize("down,right", [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_padding_with_a_vector(down, right):
    """As by `cat`, gradients too; a frozen fill needs none."""
    x = torch.randn(2, 4, 5, 3, generator=generator(), dtype=torch.float64, requires_grad=True)
    fill = torch.randn(3, generator=generator(1), dtype=torch.float64, requires_grad=True)
    wide = torch.cat([x, fill.expand(2, 4, right, 3)], 2)
    want, got = torch.cat([wide, fill.expand(2, down, 5 + right, 3)], 1), padded(x, fill, down, right)
    assert torch.equal(got, want)
    grad = torch.randn(want.shape, generator=generator(2), dtype=torch.float64)
    for ours, exact in zip(
        *(torch.autograd.grad(y, (x, fill), grad, allow_unused=True) for y in (got, want)), strict=True
    ):
        torch.testing.assert_close(torch.zeros(3).double() if ours is None else ours, exact)
    x_only = torch.autograd.grad(padded(x, fill.detach(), down, right), x, grad)[0]
    assert torch.equal(x_only, grad[:, :4, :5])
