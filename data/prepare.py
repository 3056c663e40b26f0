"""From a dataset and the data options to the normalisers of a run, and the table that shows what they do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vlaforge.data import norm_table
from vlaforge.data.dataset import Dataset
from vlaforge.data.mixture import Mixture
from vlaforge.data.normalize import NEEDED, NormalizerSet, Statistics
from vlaforge.data.schema import ACTION, STATE, DataConfig
from vlaforge.data.statistics import Computed, StatisticsSpec, sample_rows, statistics_of


@dataclass(frozen=True)
class Prepared:
    """`statistics` by column (in a mixture by ``embodiment/column``); `rows` of the start-up table."""

    normalizers: NormalizerSet
    statistics: Computed
    rows: list[norm_table.Row]


def prepare(dataset: Dataset, config: DataConfig, horizon: int, given: Statistics | None = None) -> Prepared:
    """Statistics after the action transform (stored or computed), normalisers, and their table.

    `given` are statistics to normalise by instead (those of a checkpoint), for a mixture, which gets normalisers for
    each embodiment, by ``embodiment/column``. Raises UserError for options or data that make no sense;
    `norm_table.check(prepared.rows)` is the caller's.
    """
    if not isinstance(dataset, Mixture):
        return _one(dataset, config, horizon, given)
    chosen = {part.embodiment: _of(part.embodiment, given or {}) for part in dataset.parts}
    parts = {part.embodiment: _one(part.dataset, config, horizon, chosen[part.embodiment]) for part in dataset.parts}
    normalizers = dataset.normalizers(lambda part: parts[_name(dataset, part)].normalizers)
    values: dict = {}
    rows = []
    for name, part in parts.items():
        values |= {f"{name}/{key}": stats for key, stats in part.statistics.values.items()}
        rows += [replace(row, key=f"{name} {row.key}") for row in part.rows]
    origin = "; ".join(f"{name}: {part.statistics.origin}" for name, part in parts.items())
    return Prepared(normalizers, Computed(values, origin), rows)


def _name(mixture: Mixture, dataset: Dataset) -> str:
    return next(part.embodiment for part in mixture.parts if part.dataset is dataset)


def _of(embodiment: str, given: Statistics) -> Statistics | None:
    """Those of one dataset of a mixture; None where there are none."""
    start = f"{embodiment}/"
    return {key.removeprefix(start): stats for key, stats in given.items() if key.startswith(start)} or None


def _one(dataset: Dataset, config: DataConfig, horizon: int, given: Statistics | None = None) -> Prepared:
    spec = StatisticsSpec(config.action_transform, horizon)
    present = {
        key: column
        for key, column, dim in (
            ("action", ACTION, dataset.info.action_dim),
            ("state", STATE, dataset.info.state_dim),
        )
        if dim
    }
    needed = dict.fromkeys(present.values(), NEEDED.get(config.normalization_mode, ()))
    statistics = statistics_of(dataset, spec, needed)
    if given is not None:
        statistics = replace(statistics, origin=f"of the checkpoint; the dataset's own are {statistics.origin}")
    modes = dict.fromkeys(present, config.normalization_mode)
    normalizers = NormalizerSet.from_statistics(
        given or statistics.values, modes, convention=config.normalization_convention
    )
    rows = _table(dataset, spec, normalizers, statistics.values, present)
    return Prepared(normalizers, statistics, rows)


def _table(
    dataset: Dataset,
    spec: StatisticsSpec,
    normalizers: NormalizerSet,
    stats: Statistics,
    present: dict[str, str],
) -> list[norm_table.Row]:
    names = {ACTION: dataset.info.action_names, STATE: dataset.info.state_names}
    values = sample_rows(dataset, spec)
    return [
        row
        for key, column in present.items()
        for row in norm_table.table(key, normalizers.get(key), stats[column], values.get(column), names[column])
    ]
