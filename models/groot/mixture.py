"""An official checkpoint's numbers for several datasets at once: each has the statistics of its own embodiment.

A run has one set of options, and one processing that takes states and actions as the datasets have them; datasets that
the checkpoint would treat differently are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from vlaforge.data.errors import UserError
from vlaforge.models.groot.config import GrootDataConfig
from vlaforge.models.groot.modality import Described
from vlaforge.models.groot.official import Official, Stats, places, resolve

OWN = "set data.official_statistics=false to normalise each dataset by its own statistics"


def resolve_mixture(
    data: GrootDataConfig,
    frame: tuple[int, int],
    horizon: int,
    parts: Mapping[str, Described],
    numbers: Collection[str],
) -> tuple[GrootDataConfig, Stats | None]:
    """The options of a run on `parts` (embodiment → its dataset's description), and the statistics by
    ``embodiment/column`` of those that the checkpoint has some for (None: of none).

    `numbers` are the names that the family gives weights to, where the checkpoint does not say. UserError where it
    cannot be known which statistics are meant, and where the datasets cannot share options.
    """
    official = Official.of(data)
    if official is None:
        return data, None
    known = official.numbers or numbers
    options: dict[str, GrootDataConfig] = {}
    statistics: Stats = {}
    for name, info in parts.items():
        own = replace(data, embodiment_tag=name if name in known else data.embodiment_tag)
        options[name], given = resolve(own, frame, horizon, info)
        if given is None:
            continue
        if name not in known:
            raise UserError(
                f"The mixture's dataset '{name}' is no embodiment of '{official.folder}', which has statistics of "
                f"'{data.embodiment_tag}' for the weights that it would train: say which robot it is with 'embodiment' "
                f"in the mixture's file ({', '.join(known)}), or {OWN}."
            )
        _check_as_it_is(name, info, options[name])
        statistics |= {f"{name}/{column}": values for column, values in given.items()}
    if not statistics:
        return official.options(data, frame), None
    shared = _shared(options, official)
    # The statistics are chosen: whoever reads these options is not to look for those of one embodiment again.
    return replace(shared, embodiment_tag=data.embodiment_tag, official_statistics=False), statistics


def _check_as_it_is(name: str, info: Described, data: GrootDataConfig) -> None:
    """UserError where the checkpoint's model does not see this dataset's states and actions as they are."""
    official = Official.of(data)
    for kind in ("state", "action"):
        order = [d for dims in places(kind, info, data, official).values() for d in dims]
        angles = kind == "state" and data.sin_cos_embedding_keys
        if angles or official.deviating(kind) or order != list(range(len(order))):
            raise UserError(
                f"'{official.folder}' has the {kind} of the mixture's dataset '{name}' in another order or form "
                f"(angles, parts by mean and deviation), and a mixture is taken as it is: train on this dataset alone, "
                f"or {OWN}."
            )


def _shared(options: Mapping[str, GrootDataConfig], official: Official) -> GrootDataConfig:
    """The options that all datasets have, but for the embodiment. UserError naming the first that differs."""
    first, *others = options
    for other in others:
        for entry in fields(GrootDataConfig):
            pair = [getattr(options[name], entry.name) for name in (first, other)]
            if entry.name != "embodiment_tag" and pair[0] != pair[1]:
                raise UserError(
                    f"By '{official.folder}', data.{entry.name} is {pair[0]} for the mixture's dataset '{first}' and "
                    f"{pair[1]} for '{other}', and a run has one: give it where the checkpoint leaves it open, "
                    f"train on one of them, or {OWN}."
                )
    return options[first]
