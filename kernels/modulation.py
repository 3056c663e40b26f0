"""How a modulation (scale, shift, gate) spreads over tokens, without being repeated in memory.

A modulation m [B, S, D] has one row a segment of tokens: S = 1 is one a sample (AdaRMS of π0.5, DiT of GR00T),
S = frames is one a video frame (Wan models), S = T one a token. Segments are equally long and in order; or, with
`index` [T] (int32, not decreasing, the same for all samples), of any lengths: token t takes row index[t].

Kernels take the row by stride; the backward sums over the tokens of each segment in a fixed order (no atomics), one
program for a segment and each of its `shares`, and torch adds the shares.

Axes: B samples, T tokens, S segments, D channels, P shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import cdiv, programs


def tokens(x: Tensor) -> Tensor:
    """`x` [B, ..., D] as [B, T, D] (a copy only where its strides do not allow a view)."""
    return x if x.ndim == 3 else x.reshape(x.shape[0], -1, x.shape[-1])


def segments(m: Tensor, x: Tensor, indexed: bool = False) -> Tensor:
    """The modulation `m` of x [B, ..., D] as a view [B, S, D].

    Accepted for x [B, T, D]: [D], [B, D], [B, 1, D], [B, T, D], and [B, S, D] with S dividing T; for x
    [B, F, L, D] also [B, F, 1, D]. A batch of 1 stands for all samples. ValueError for anything else.
    """
    b, d = x.shape[0], x.shape[-1]
    count = x.numel() // max(1, b * d)
    if m.ndim == 1:
        m = m[None, None]
    elif m.ndim == 2:
        m = m[:, None]
    elif m.ndim > 3:
        middle = tuple(m.shape[1:-1])
        lead = next((i for i, size in enumerate(middle) if size == 1), len(middle))
        if middle[:lead] != tuple(x.shape[1 : 1 + lead]) or set(middle[lead:]) - {1}:
            raise ValueError(f"modulation {list(m.shape)} does not broadcast over {list(x.shape)}")
        m = m.flatten(1, -2)
    s = m.shape[1]
    if m.shape[-1] != d or m.shape[0] not in (1, b) or (not indexed and (s == 0 or count % s)):
        raise ValueError(
            f"modulation {list(m.shape)} does not fit {list(x.shape)}: [B or 1, S, D] with S dividing the "
            "tokens is allowed, or any S with an index"
        )
    return m.expand(b, -1, -1)


def spread(x_BTD: Tensor, index_T: Tensor | None, *modulations: Tensor) -> tuple[Tensor, ...]:
    """x and modulations [B, S, D] in shapes that broadcast: x [B, S, L, D] and [B, S, 1, D]."""
    if index_T is not None:
        return x_BTD, *(m.index_select(1, index_T) for m in modulations)
    return x_BTD.unflatten(1, (modulations[0].shape[1], -1)), *(m.unsqueeze(2) for m in modulations)


@dataclass(frozen=True)
class Spread:
    """What a launcher needs: sizes, the tokens of a uniform segment (0 with an index), and where segments start."""

    batch: int
    tokens: int
    segments: int
    run: int
    starts: Tensor | None

    @classmethod
    def of(cls, x_BTD: Tensor, m_BSD: Tensor, index_T: Tensor | None, backward: bool = False) -> Spread:
        (b, t, _), s = x_BTD.shape, m_BSD.shape[1]
        starts = None
        if index_T is not None and backward:
            edges = torch.arange(s + 1, device=x_BTD.device, dtype=index_T.dtype)
            starts = torch.searchsorted(index_T, edges, out_int32=True)
        return cls(b, t, s, 0 if index_T is not None else t // s, starts)

    def shares(self, rows: int, columns: int, device: torch.device) -> int:
        """How many programs share a segment's tokens, so that the device is full; 1 for single tokens."""
        longest = cdiv(self.run or cdiv(self.tokens, self.segments), rows)
        busy = self.batch * self.segments * columns
        return max(1, min(longest, cdiv(programs(1 << 30, device), max(1, busy))))


def room_for_shares(shares: int, m: Tensor) -> Tensor:
    """[P, B, S, D] for the shares' sums: fp32, or m's dtype when there is one share and nothing is left to add."""
    return m.new_empty((shares, *m.shape), dtype=m.dtype if shares == 1 else torch.float32)


def add_shares(room: Tensor, m: Tensor) -> Tensor:
    return room[0] if room.shape[0] == 1 else room.sum(0).to(m.dtype)


@triton.jit
def segment_of(token, keep, run, index_ptr):
    """The segment of each token: by the uniform length, or by the index."""
    if index_ptr is not None:
        segment = tl.load(index_ptr + token, mask=keep, other=0).to(tl.int32)
    else:
        segment = token // run
    return segment


@triton.jit
def segment_bounds(segment, run, starts_ptr):
    """First token of a segment, and the one after its last."""
    if starts_ptr is not None:
        first = tl.load(starts_ptr + segment)
        last = tl.load(starts_ptr + segment + 1)
    else:
        first = segment * run
        last = first + run
    return first, last
