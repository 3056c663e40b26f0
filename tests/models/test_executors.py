"""Attention by other executors: the same mixture as SDPA's for every kind of mask they are given."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.models.blocks.attention import Attention, Mask, attention
from vlaforge.models.blocks.executors import BLOCK, block_mask, flash_attention, flex_attention

KINDS = ("padding", "causal", "causal_padding", "segments", "mixed_segments")
CASES = [(kind, 300, 300) for kind in KINDS] + [(kind, 130, 300) for kind in KINDS[:3]]


def inputs(queries: int, keys: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (heads, queries), (groups, keys), (groups, keys)
    return tuple(torch.randn(3, h, n, 16, generator=g) for h, n in shapes)


def mask_of(kind: str, queries: int, keys: int) -> Mask:
    """One sample without padding, one padded at its start over more than a block, one with holes."""
    g = torch.Generator().manual_seed(1)
    valid = torch.rand(3, keys, generator=g) > 0.4
    valid[0], valid[1, : BLOCK + 12], valid[1, BLOCK + 12 :] = True, False, True
    runs = (torch.arange(keys) // 70)[None].repeat(3, 1)
    runs[0, 200:] = -1
    return {
        "padding": Mask.padding(valid),
        "causal": Mask.causal(),
        "causal_padding": Mask.causal_padding(valid),
        "segments": Mask.segments(runs),
        "mixed_segments": Mask.segments(torch.randint(-1, 3, (3, keys), generator=g)),
    }[kind]


@pytest.mark.parametrize(("kind", "queries", "keys"), [*CASES, ("causal_padding", 7, 7), ("segments", 7, 7)])
def test_flex_attention_mixes_as_sdpa_does(kind: str, queries: int, keys: int) -> None:
    q, k, v = inputs(queries, keys)
    mask = mask_of(kind, queries, keys)
    torch.testing.assert_close(flex_attention(q, k, v, mask), attention(q, k, v, mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "queries", "keys"), CASES)
def test_blocks_that_are_left_out_or_read_whole_are_right(kind: str, queries: int, keys: int) -> None:
    mask = mask_of(kind, queries, keys)
    blocks = block_mask(mask, queries, keys)
    seen = mask.dense(queries, keys).expand(3, 1, queries, keys)
    left_out = 0
    for b in range(blocks.kv_num_blocks.shape[0]):
        for m in range(blocks.kv_num_blocks.shape[2]):
            partial = blocks.kv_indices[b, 0, m, : blocks.kv_num_blocks[b, 0, m]].tolist()
            full = blocks.full_kv_indices[b, 0, m, : blocks.full_kv_num_blocks[b, 0, m]].tolist()
            assert not set(partial) & set(full)
            samples = slice(None) if blocks.kv_num_blocks.shape[0] == 1 else slice(b, b + 1)
            for n in range(-(-keys // BLOCK)):
                part = seen[samples, 0, m * BLOCK : (m + 1) * BLOCK, n * BLOCK : (n + 1) * BLOCK]
                assert n not in full or part.all()
                assert n in full or n in partial or not part.any()
                left_out += n not in full and n not in partial
    assert left_out or kind == "mixed_segments" or queries < keys


def test_flex_attention_in_one_graph() -> None:
    q, k, v = inputs(300, 300)
    valid = mask_of("padding", 300, 300).keys_BS

    def run(q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        return flex_attention(q, k, v, Mask.causal_padding(valid))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, valid), run(q, k, v, valid), atol=1e-6, rtol=1e-6)


def test_each_kind_of_mask_has_its_executor() -> None:
    module, called = Attention(), []
    q, k, v = inputs(5, 5)
    for name in ("plain", "structured"):
        setattr(module, name, lambda *args, name=name: called.append(name) or attention(*args))
    valid = torch.ones(3, 5, dtype=torch.bool)
    masks = None, Mask.causal(), Mask.padding(valid), Mask.causal_padding(valid), Mask.segments(valid.long())
    outputs = [module(q, k, v, mask) for mask in masks]
    assert called == ["plain", "plain", "structured", "structured"]
    torch.testing.assert_close(outputs[0], outputs[2])


@pytest.mark.parametrize("mask", [None, Mask.causal()], ids=["full", "causal"])
def test_flash_attention_gets_tokens_before_heads(monkeypatch: pytest.MonkeyPatch, mask: Mask | None) -> None:
    """The package's function by its contract: [B, T, H, K], grouped heads, causal to the lower right corner."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q, k, v = inputs(5, 9)
    torch.testing.assert_close(flash_attention(q, k, v, mask), attention(q, k, v, mask))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_on_a_gpu(kind: str) -> None:
    q, k, v = (x.cuda().requires_grad_() for x in inputs(300, 300))
    mask = mask_of(kind, 300, 300)
    fields = (None if x is None else x.cuda() for x in (mask.keys_BS, mask.segments_BT))
    keys, segments = fields
    mask = Mask(keys, mask.is_causal, segments)
    outputs = [run(q, k, v, mask) for run in (flex_attention, attention)]
    torch.testing.assert_close(*outputs, atol=2e-3, rtol=2e-3)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outputs]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-2)
