"""Reading in nearly sequential order, for data that is larger than memory or lies on slow disks
(``--streaming``).

The order is still a pure function of (seed, epoch, cursor), computed piece by piece, so streaming resumes as
exactly as random access, and no sample reaches two ranks or workers. It is built like this:

1. *Shards*: runs of neighbouring episodes with about `shard_rows` rows; their order is shuffled each epoch.
2. *Streams*: the sequence of shards is cut into `streams` equal parts that are read side by side.
3. *Shuffle buffer*: within a stream, each window of `buffer` rows is shuffled.
4. *Blocks*: a block of `block` samples (one micro-batch) takes turns among the streams of one *group*;
consecutive
   blocks come from consecutive groups. With `groups` a multiple of ranks × workers, each worker reads its
   own streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError
from vlaforge.data.samplers import Order
from vlaforge.data.schema import sample_rng


class StreamOrder(Order):
    """See the module. `shards` are (first position, rows) that cover the dataset; `streams` a multiple of
    `groups`.
    """

    def __init__(
        self,
        shards: Sequence[tuple[int, int]],
        block: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        groups: int = 8,
        streams: int = 64,
        buffer: int = 1000,
    ):
        self.shards, self.block, self.seed, self.shuffle = tuple(shards), block, seed, shuffle
        self.groups, self.buffer = groups, buffer
        self.size = sum(rows for _, rows in shards)
        if self.size < 1:
            raise UserError("The dataset has no samples: no episode is selected, or all of them are empty.")
        if streams % groups or min(block, groups, buffer) < 1:
            raise UserError(f"Streaming needs streams ({streams}) to be a multiple of groups ({groups}), both above 0.")
        # a small dataset has fewer streams, so that each still fills its blocks
        per_group = max(1, min(streams // groups, self.size // (groups * block)))
        self.streams = per_group * groups if self.size >= groups * block else 1
        self.groups = groups if self.streams > 1 else 1
        self.length = self.size // self.streams
        self._sequence = lru_cache(maxsize=2)(self._shard_sequence)
        self._window = lru_cache(maxsize=4 * self.streams)(self._permutation)

    def identity(self) -> dict[str, str | int]:
        own = {name: getattr(self, name) for name in ("block", "groups", "streams", "buffer")}
        return {**super().identity(), **own}

    @classmethod
    def of(cls, dataset: Dataset, block: int, *, shard_rows: int = 4096, **options) -> StreamOrder:
        """Shards of whole neighbouring episodes of `dataset`."""
        shards, start = [], 0
        for end in dataset.ends:
            if end - start >= shard_rows or (end == len(dataset) and end > start):
                shards.append((start, end - start))
                start = end
        return cls(shards, block, **options)

    def slice(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        stream, index = self._place(np.arange(start, stop, dtype=np.int64))
        if self.shuffle:
            index = self._shuffled(epoch, stream, index)
        return self._positions(epoch, stream * self.length + index), np.full(stop - start, epoch, np.int64)

    def _place(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(stream, index in it) of places in the epoch; the few rows that fill no block come last, in stream
        order.
        """
        per_group = self.streams // self.groups
        share = self.block // per_group if self.block % per_group == 0 else 0
        if not share:  # a block does not divide among its streams: it takes one stream, in turn
            per_group, share = 1, self.block
        lanes = self.streams // per_group
        rounds = self.length // share
        block, inside = np.divmod(place, self.block)
        turn, lane = np.divmod(block, lanes)
        # lane l holds streams l·per_group ...; within a block its streams take turns
        step, member = np.divmod(inside, per_group)
        stream, index = lane * per_group + member, turn * share + step
        full = rounds * lanes * self.block
        rest = place - full
        left = self.length - rounds * share
        tail_stream, tail_index = np.divmod(rest, max(left, 1))
        tail_index = tail_index + rounds * share
        beyond = rest - left * self.streams  # rows that no stream holds, behind the last one
        tail_stream = np.where(beyond >= 0, self.streams - 1, tail_stream)
        tail_index = np.where(beyond >= 0, self.length + beyond, tail_index)
        late = place >= full
        return np.where(late, tail_stream, stream), np.where(late, tail_index, index)

    def _shuffled(self, epoch: int, stream: np.ndarray, index: np.ndarray) -> np.ndarray:
        window, inside = np.divmod(index, self.buffer)
        out = index.copy()
        inner = index < self.length  # the rows behind the last stream stay in order
        for key in {*zip(stream[inner].tolist(), window[inner].tolist())}:
            of = inner & (stream == key[0]) & (window == key[1])
            out[of] = key[1] * self.buffer + self._window(epoch, *key)[inside[of]]
        return out

    def _permutation(self, epoch: int, stream: int, window: int) -> np.ndarray:
        rows = min(self.buffer, self.length - window * self.buffer)
        return sample_rng(self.seed, epoch, window, f"stream.{stream}").permutation(rows)

    def _shard_sequence(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """First positions of the shards in this epoch's order, and where each starts in the sequence."""
        order = np.arange(len(self.shards))
        if self.shuffle:
            order = sample_rng(self.seed, epoch, 0, "shards").permutation(len(self.shards))
        starts, rows = np.asarray(self.shards, np.int64)[order].T
        return starts, np.concatenate([[0], np.cumsum(rows)[:-1]])

    def _positions(self, epoch: int, at: np.ndarray) -> np.ndarray:
        starts, begins = self._sequence(epoch)
        shard = np.searchsorted(begins, at, side="right") - 1
        return starts[shard] + at - begins[shard]
