"""Dropout without a random generator: the mask is a hash of (the sample's seed, the layer's salt, the position).

A step stays a pure function of its inputs: the same samples drop the same elements on any rank, in any batch and in a
captured graph. The hash is the finaliser of MurmurHash3 (public domain, A. Appleby) on 32-bit words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: spreads consecutive positions over the word


def _mix(word: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, on int64 tensors that hold 32-bit words."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B & _MASK
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & _MASK
    return word ^ (word >> 16)


def keep_mask(seed_B: Tensor, salt: int, shape: tuple[int, ...], drop: float) -> Tensor:
    """Bool [B, *shape]: False with probability `drop`, a function of (seed, salt, position) alone.

    Args:
        seed_B: int64 [B], one seed a sample (any 62-bit number).
        salt: distinguishes the layers of one model.
        shape: without the batch axis.
        drop: probability in [0, 1).
    """
    count = 1
    for size in shape:
        count *= size
    position_N = torch.arange(count, device=seed_B.device, dtype=torch.int64)
    # Both halves of the seed enter, each through the mixer, so that near seeds give unrelated masks.
    key_B = _mix((seed_B & _MASK) ^ _mix((seed_B >> 32) + salt * _GOLDEN & _MASK))
    word_BN = _mix((position_N * _GOLDEN & _MASK)[None] ^ key_B[:, None])
    return (word_BN >= int(drop * 2**32)).view(seed_B.shape[0], *shape)


class Dropout(nn.Module):
    """Inverted dropout with probability `p`; active in training mode, and only when a seed is given.

    Args:
        p: drop probability in [0, 1).
        salt: a number that no other dropout of the model has.
        whole_sample: drop a sample's whole tensor or none of it (stochastic depth).
    """

    def __init__(self, p: float, salt: int, whole_sample: bool = False):
        super().__init__()
        self.p, self.salt, self.whole_sample = p, salt, whole_sample

    def active(self, seed_B: Tensor | None) -> bool:
        return self.training and self.p > 0 and seed_B is not None

    def keep(self, seed_B: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Bool [B, *shape]: this layer's mask for the samples' seeds."""
        return keep_mask(seed_B, self.salt, shape, self.p)

    def forward(self, x: Tensor, seed_B: Tensor | None) -> Tensor:
        """`x` [B, ...] with the dropped elements zero and the others scaled by 1 / (1 - p)."""
        if not self.active(seed_B):
            return x
        keep = self.keep(seed_B, (1,) * (x.ndim - 1) if self.whole_sample else tuple(x.shape[1:]))
        return torch.where(keep, x / (1.0 - self.p), torch.zeros((), dtype=x.dtype, device=x.device))

    def extra_repr(self) -> str:
        return f"p={self.p}, salt={self.salt}"
