"""Attention by other libraries, for the kinds of masks that they are better at than SDPA; see `attention.Attention`.

    flex_attention    torch's FlexAttention: causal with padding, and segments, without a bool a (query, key) pair
    flash_attention   the flash-attn package: no mask, or a causal one

Axes: B samples, H query heads, G key/value heads, T queries, S keys, K head width; M and N blocks of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import flex_attention as _flex

from vlaforge.models.blocks.attention import Mask

BLOCK = 128
"""Queries and keys of a block, FlexAttention's default."""


def flex_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask | None = None) -> Tensor:
    """`attention` by FlexAttention; a query that sees nothing mixes to zeros. Outside of compiled code on a GPU it
    compiles itself; on a CPU it runs as plain torch."""
    run = _compiled() if q_BHTK.is_cuda and not torch.compiler.is_compiling() else _flex
    blocks = None if mask is None else block_mask(mask, q_BHTK.shape[2], k_BGSK.shape[2])
    return run(q_BHTK, k_BGSK, v_BGSK, block_mask=blocks, enable_gqa=q_BHTK.shape[1] != k_BGSK.shape[1])


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_flex, dynamic=False)


def block_mask(mask: Mask, queries: int, keys: int) -> BlockMask | None:
    """Which blocks of keys a block of queries reads, from the structure alone: [B, 1, M, N] is the largest tensor made.

    A block that may hold both kinds is read under the mask's formula; one that holds only visible keys, without. None
    for a mask that hides nothing.
    """
    shift = keys - queries
    needed_BMN: list[Tensor] = []
    full_BMN: list[Tensor] = []
    if mask.keys_BS is not None:
        low_BN, high_BN = _ends(mask.keys_BS.int(), fill=0)
        needed_BMN.append((high_BN > 0)[:, None])
        full_BMN.append((low_BN > 0)[:, None])
    if mask.segments_BT is not None:
        low_BN, high_BN = _ends(mask.segments_BT, fill=-1)
        overlap = (low_BN[:, :, None] <= high_BN[:, None]) & (low_BN[:, None] <= high_BN[:, :, None])
        needed_BMN.append(overlap & (high_BN >= 0)[:, None])
        one_BN = (low_BN == high_BN) & (high_BN >= 0)
        full_BMN.append((high_BN[:, :, None] == high_BN[:, None]) & one_BN[:, :, None] & one_BN[:, None])
    if mask.is_causal:
        device = next((t.device for t in (mask.keys_BS, mask.segments_BT) if t is not None), None)
        first_M = torch.arange(0, queries, BLOCK, device=device)[:, None] + shift
        first_N = torch.arange(0, keys, BLOCK, device=device)
        needed_BMN.append((first_N <= first_M + BLOCK - 1)[None])
        full_BMN.append((first_N + BLOCK - 1 <= first_M)[None])
    if not needed_BMN:
        return None
    needed, full = _all(needed_BMN), _all(full_BMN)
    m, n = -(-queries // BLOCK), -(-keys // BLOCK)
    needed, full = needed.expand(-1, m, n)[:, None], full.expand(-1, m, n)[:, None]

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = k <= q + shift if mask.is_causal else k >= 0
        if mask.keys_BS is not None:
            seen = seen & mask.keys_BS[b, k]
        if mask.segments_BT is not None:
            seen = seen & (mask.segments_BT[b, q] == mask.segments_BT[b, k]) & (mask.segments_BT[b, k] >= 0)
        return seen

    lists = (*_listed(needed & ~full), *_listed(full))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys))


def _ends(x_BS: Tensor, fill: int) -> tuple[Tensor, Tensor]:
    """(least, greatest) of each block [B, N]; `fill` completes the last block, and makes it neither needed nor full."""
    blocks_BNK = F.pad(x_BS, (0, -x_BS.shape[1] % BLOCK), value=fill).unflatten(1, (-1, BLOCK))
    return blocks_BNK.amin(-1), blocks_BNK.amax(-1)


def _all(parts: list[Tensor]) -> Tensor:
    together = parts[0]
    for part in parts[1:]:
        together = together & part
    return together


def _listed(chosen_B1MN: Tensor) -> tuple[Tensor, Tensor]:
    """(how many blocks of keys [B, 1, M], which ones first [B, 1, M, N]), int32."""
    order = torch.argsort(chosen_B1MN.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen_B1MN.sum(-1, dtype=torch.int32), order.to(torch.int32)


def flash_installed() -> bool:
    return find_spec("flash_attn") is not None


def flash_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask | None = None) -> Tensor:
    """`attention` by flash-attn, for bf16 or fp16 on a GPU; without a mask, or with a causal one."""
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q_BHTK, k_BGSK, v_BGSK))
    return flash_attn_func(q, k, v, causal=mask is not None and mask.is_causal).transpose(1, 2)
