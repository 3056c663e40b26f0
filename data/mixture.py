"""Several datasets as one, drawn from by weight.

    --dataset-path mixture.yaml          datasets:
                                           - {path: ../a, weight: 3, embodiment: libero_panda}
                                           - {path: ../b, weight: 1, embodiment: aloha, episodes: "0:50"}

Each dataset keeps its own statistics, under its embodiment's name, and goes through its own permutations: a
dataset that is drawn from often starts over (with fresh randomness) only after all of its samples were seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vlaforge.data.dataset import Dataset, DatasetInfo, Episode
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.samplers import Order, Shuffled
from vlaforge.data.schema import DataNeeds, Sample, sample_rng

ROWS = 1 << 40
"""Row ids of dataset i start at i · ROWS, so that a filter in one dataset changes no id of another."""

OPTIONS = ("format", "episodes", "split", "action_key", "state_key", "language_key")
FIELDS = ("path", "weight", "embodiment", *OPTIONS)


@dataclass(frozen=True)
class Part:
    """One dataset; `weight` None: its share of all samples. `embodiment` names its statistics; `options` opened it."""

    dataset: Dataset
    weight: float | None = None
    embodiment: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Weighted(Order):
    """An epoch of `size` draws (default: as many as there are samples), a fixed number from each dataset.

    Args:
        counts: samples of each dataset; their positions follow one another.
        weights: shares of the draws, any positive scale.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        seed: int = 0,
        shuffle: bool = True,
        size: int | None = None,
    ):
        self.counts, self.weights, self.seed, self.shuffle = tuple(counts), tuple(weights), seed, shuffle
        self.size = sum(counts) if size is None else size
        self.draws = _apportion(self.size, self.weights)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        self._parts = [Shuffled(count, seed + 7919 * i, shuffle) for i, count in enumerate(self.counts)]
        self._epoch = lru_cache(maxsize=2)(self._whole)

    def __reduce__(self):
        return Weighted, (self.counts, self.weights, self.seed, self.shuffle, self.size)

    def slice(self, epoch: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        positions, epochs = self._epoch(epoch)
        return positions[start:stop], epochs[start:stop]

    def _whole(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self.shuffle:
            which = np.repeat(np.arange(len(self.draws)), self.draws)
            which = sample_rng(self.seed, epoch, 0, "mixture").permutation(which)
        else:  # evenly interleaved
            places = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in self.draws])
            which = np.repeat(np.arange(len(self.draws)), self.draws)[np.argsort(places, kind="stable")]
        positions, epochs = np.empty(self.size, np.int64), np.empty(self.size, np.int64)
        for part, draws in enumerate(self.draws):
            of_part = which == part
            found, passes = self._draws(part, epoch * draws, (epoch + 1) * draws)
            positions[of_part], epochs[of_part] = self.starts[part] + found, passes
        return positions, epochs

    def _draws(self, part: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The start-th to stop-th draw from one dataset since the beginning: (its positions, its passes)."""
        count, found = self.counts[part], [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
        while start < stop:
            passes, offset = divmod(start, count)
            end = min(offset + stop - start, count)
            found.append(self._parts[part].slice(passes, offset, end))
            start += end - offset
        return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])


def _apportion(size: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `size`, as close to the weights as they can be (largest remainder)."""
    exact = np.asarray(weights, np.float64) / sum(weights) * size
    whole = np.floor(exact).astype(int)
    for index in np.argsort(-(exact - whole), kind="stable")[: size - whole.sum()]:
        whole[index] += 1
    return whole.tolist()


class Mixture(Dataset):
    """The datasets of `parts` one after the other; `order` draws from them by weight.

    A sample carries ``dataset_index`` and ``embodiment``. Cameras are those of any part: a part that lacks
    one that is asked for gives samples without it, which the family's processing masks.
    """

    def __init__(self, parts: Sequence[Part]):
        if not parts:
            raise UserError("A mixture needs at least one dataset.")
        if any(part.weight is not None and not part.weight > 0 for part in parts):
            raise UserError("The weights of a mixture must be above 0; leave a dataset out instead of giving it 0.")
        if len({part.weight is None for part in parts}) > 1:
            raise UserError("Either all datasets of a mixture have a weight, or none.")
        self.parts = list(parts)
        self.info = self._describe()
        self.episodes = [
            replace(episode, index=number * ROWS + episode.index, start=number * ROWS + episode.start)
            for number, part in enumerate(parts)
            for episode in part.dataset.episodes
        ]
        self._starts = np.concatenate([[0], np.cumsum([len(part.dataset) for part in parts])])
        self.notes = [f"{part.dataset.info.path}: {note}" for part in parts for note in part.dataset.notes]

    @property
    def embodiments(self) -> tuple[str, ...]:
        return tuple(part.embodiment for part in self.parts)

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for part in self.parts for task in part.dataset.tasks()))

    @cached_property
    def ends(self) -> list[int]:
        starts = self._starts.tolist()
        return [start + end for start, part in zip(starts, self.parts) for end in part.dataset.ends]

    def locate(self, position: int) -> tuple[Episode, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside 0..{len(self) - 1}")
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        episode, frame = self.parts[number].dataset.locate(position - int(self._starts[number]))
        return self._episodes[number * ROWS + episode.index], frame

    @cached_property
    def _episodes(self) -> dict[int, Episode]:
        return {episode.index: episode for episode in self.episodes}

    def costs(self) -> np.ndarray:
        return np.concatenate([part.dataset.costs() for part in self.parts])

    def order(self, seed: int, shuffle: bool = True) -> Weighted:
        counts = [len(part.dataset) for part in self.parts]
        weights = [count if part.weight is None else part.weight for part, count in zip(self.parts, counts)]
        return Weighted(counts, weights, seed, shuffle)

    def get(self, position: int, needs: DataNeeds) -> Sample:
        return self.get_many([position], needs)[0]

    def get_many(self, positions: Sequence[int], needs: DataNeeds) -> list[Sample]:
        owners = np.searchsorted(self._starts, positions, side="right") - 1
        out: list[Sample] = [{}] * len(positions)
        for number in np.unique(owners).tolist():
            part, slots = self.parts[number], np.flatnonzero(owners == number).tolist()
            cameras = part.dataset.info.cameras
            own = (
                needs
                if needs.cameras is None
                else replace(needs, cameras=tuple(c for c in needs.cameras if c in cameras))
            )
            local = [int(positions[slot] - self._starts[number]) for slot in slots]
            for slot, sample in zip(slots, part.dataset.get_many(local, own)):
                out[slot] = {**sample, "dataset_index": number, "embodiment": part.embodiment}
        return out

    def column(self, key: str, episode: Episode) -> np.ndarray:
        number, index = divmod(episode.index, ROWS)
        return self.parts[number].dataset.column(key, self._own_episodes[number][index])

    @cached_property
    def _own_episodes(self) -> list[dict[int, Episode]]:
        return [{episode.index: episode for episode in part.dataset.episodes} for part in self.parts]

    def fingerprint(self) -> str:
        parts = [(part.dataset.fingerprint(), part.weight, part.embodiment) for part in self.parts]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def normalizers(self, make: Callable[[Dataset], NormalizerSet]) -> NormalizerSet:
        """One set with every part's normalisers under its embodiment; `make` gives the set of one dataset."""
        entries: dict[str, Mapping[str, Any]] = {}
        for part in self.parts:
            if part.embodiment in entries:
                raise UserError(
                    f"Two datasets of the mixture have the embodiment '{part.embodiment}'; give each its own name, "
                    f"because each has its own statistics."
                )
            entries[part.embodiment] = make(part.dataset).entries[""]
        return NormalizerSet(entries)

    def _describe(self) -> DatasetInfo:
        infos = [part.dataset.info for part in self.parts]
        cameras = {name: camera for info in reversed(infos) for name, camera in info.cameras.items()}
        widest = {n: max(infos, key=lambda info: getattr(info, f"{n}_dim")) for n in ("state", "action")}
        return DatasetInfo(
            path=Path(" + ".join(str(info.path) for info in infos)),
            format="mixture",
            version="1",
            fps=infos[0].fps,
            cameras=cameras,
            state_dim=widest["state"].state_dim,
            action_dim=widest["action"].action_dim,
            state_names=widest["state"].state_names,
            action_names=widest["action"].action_names,
            robot_type=infos[0].robot_type if len({info.robot_type for info in infos}) == 1 else None,
        )


def open_mixture(
    path: Path | str, open_one: Callable[..., Dataset], episodes: Sequence[int] | str | None = None
) -> Mixture:
    """The mixture that a YAML file describes (see the module); relative paths are relative to the file.

    `open_one(path, **those of OPTIONS that are given)` opens one dataset. `episodes` are numbers of the mixture's own
    episode table; only those are kept.
    """
    if isinstance(episodes, str):
        raise UserError(f"Episodes of a mixture are chosen in '{path}', dataset by dataset, not with --episodes.")
    path = Path(path)
    try:
        entries = yaml.safe_load(path.read_text())["datasets"]
        entries = [dict(entry) for entry in entries]
    except (OSError, yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise UserError(
            f"'{path}' describes no mixture: it needs a list 'datasets' of path, weight, embodiment."
        ) from error
    parts = []
    for entry in entries:
        if extra := set(entry) - set(FIELDS):
            raise unknown(f"entry in {path}", sorted(extra)[0], FIELDS)
        if "path" not in entry:
            raise UserError(f"A dataset of the mixture '{path}' has no path.")
        options = {name: entry[name] for name in OPTIONS if name in entry}
        found = (path.parent / Path(entry["path"]).expanduser()).resolve()
        name = str(entry.get("embodiment") or found.name)
        weight = entry.get("weight")
        if weight is not None and not isinstance(weight, int | float):
            raise UserError(f"The weight of '{entry['path']}' in {path} is '{weight}'; it must be a number.")
        dataset = open_one(found if found.exists() else entry["path"], **options)
        parts.append(Part(dataset, weight, name, options))
    if episodes is None:
        return Mixture(parts)
    return Mixture(_restricted(parts, [int(number) for number in episodes], open_one))


def _restricted(parts: Sequence[Part], episodes: Sequence[int], open_one: Callable[..., Dataset]) -> list[Part]:
    """The parts that have any of these episodes, with those alone."""
    kept = []
    for number, part in enumerate(parts):
        own = [index - number * ROWS for index in episodes if index // ROWS == number]
        if own:
            dataset = open_one(part.dataset.info.path, **{**part.options, "episodes": own})
            kept.append(replace(part, dataset=dataset))
    return kept
