"""What a dataset is, whatever its format: an episode table, samples by position, columns by episode.

Readers in `data/readers/` implement `Dataset`; everything above (statistics, samplers, loader, checks) uses
only this. Row ids are those of the whole dataset: a filter of episodes changes which rows are visited, never
their ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from vlaforge.data.schema import DataNeeds, Sample


@dataclass(frozen=True)
class Camera:
    """One image stream; sizes in pixels. `kind` is ``video`` or ``image``."""

    name: str
    height: int
    width: int
    kind: str = "video"


@dataclass(frozen=True)
class Episode:
    """`start` is the row id of its first frame in the whole dataset, `length` its frames."""

    index: int
    length: int
    start: int
    tasks: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetInfo:
    """What is known without reading rows. Dimensions are 0 when the dataset has no such column."""

    path: Path
    format: str
    version: str
    fps: float
    cameras: Mapping[str, Camera]
    state_dim: int
    action_dim: int
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    robot_type: str | None = None


class Dataset(ABC):
    """Samples by position 0..len-1 over the selected episodes, in order."""

    info: DatasetInfo
    episodes: Sequence[Episode]
    notes: Sequence[str] = ()
    """What a run should say about how the data is read: the video backend and why it is this one."""

    @property
    def embodiments(self) -> tuple[str, ...]:
        """What samples have under ``embodiment``; a dataset of one robot says nothing there."""
        return ("",)

    def tasks(self) -> list[str]:
        """The different task texts of the samples; "" for none."""
        return list(dict.fromkeys(text for episode in self.episodes for text in episode.tasks or ("",)))

    @cached_property
    def ends(self) -> list[int]:
        """The position behind the last sample of each episode; each row starts one unless a reader says otherwise."""
        return list(accumulate(episode.length for episode in self.episodes))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, position: int) -> tuple[Episode, int]:
        """(episode, frame within it) of the sample at `position`. IndexError outside 0..len-1."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside 0..{len(self) - 1}")
        number = bisect_right(self.ends, position)
        episode = self.episodes[number]
        return episode, position - (self.ends[number] - episode.length)

    def row_id(self, position: int) -> int:
        """The sample's row id in the whole dataset, which its randomness is keyed by."""
        episode, frame = self.locate(position)
        return episode.start + frame

    @abstractmethod
    def get(self, position: int, needs: DataNeeds) -> Sample:
        """The sample at `position`, in canonical keys (see `vlaforge.data.schema.Sample`)."""

    def get_many(self, positions: Sequence[int], needs: DataNeeds) -> list[Sample]:
        """The samples at `positions`, in that order; a video's frames are decoded together."""
        return [self.get(position, needs) for position in positions]

    def costs(self) -> np.ndarray:
        """float64 [len]: a guess at each sample's work in tokens, to even out ranks: 256 a camera, and one for every
        four letters of the task."""
        letters = [max((len(task) for task in episode.tasks), default=0) for episode in self.episodes]
        return np.repeat(256.0 * len(self.info.cameras) + np.array(letters) / 4, np.diff([0, *self.ends]))

    @abstractmethod
    def column(self, key: str, episode: Episode) -> np.ndarray:
        """A numeric column of one episode [length, ...], without decoding video."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of what is on disk (names, sizes, metadata) and of the selected episodes: the key
        of caches."""

    def stored_statistics(self) -> Mapping[str, Mapping[str, np.ndarray]] | None:
        """Statistics that the dataset itself carries, or None."""
        return None
