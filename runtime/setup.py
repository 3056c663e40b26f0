"""What a run needs besides the model: data, statistics, normalisers, tokenizer, processing, contract, device.

`build_setup` makes all of it from a resolved configuration, in the order in which faults are cheapest to find. The
trainer, the open-loop check and ``--dry-run`` work on the same object, so that what was checked is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vlaforge.data import norm_table
from vlaforge.data.dataset import Dataset, DatasetInfo
from vlaforge.data.dummy import DummyDataset, DummyProcessing
from vlaforge.data.errors import UserError, nearest
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.prepare import prepare
from vlaforge.data.readers import open_dataset
from vlaforge.data.readers.selection import parse_ranges
from vlaforge.data.schema import ACTION, STATE, Contract
from vlaforge.data.statistics import Computed
from vlaforge.data.tokenizer import Tokenizer
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.config import Resolved


@dataclass
class Setup:
    """The parts of a run that exist before its model.

    `dataset` holds the training episodes, `held_out` the others (None without ``--eval-episodes``). `model_config` and
    `data_config` have the dataset's dimensions filled in. `statistics` is None for synthetic data. `norm_rows` is the
    table of what normalisation does to each dimension; `notes` are sentences for the log.
    """

    resolved: Resolved
    device: torch.device
    dataset: Dataset
    held_out: Dataset | None
    model_config: Any
    data_config: Any
    contract: Contract
    processing: Any
    normalizers: NormalizerSet
    statistics: Computed | None = None
    tokenizer: Tokenizer | None = None
    norm_rows: list[norm_table.Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def args(self) -> TrainingArgs:
        return self.resolved.args

    @property
    def synthetic(self) -> bool:
        return isinstance(self.dataset, DummyDataset)


def build_setup(resolved: Resolved, passed: Callable[[str, str], None] = lambda name, what: None) -> Setup:
    """Builds everything but the model; raises UserError on the first fault.

    `passed(name, what)` is told of each check that held.
    """
    device = pick_device(resolved.args.device)
    passed("device", str(device))
    if resolved.args.dataset_format == "dummy_datasets":
        return _synthetic(resolved, device, passed)
    check_strategy(resolved)
    dataset, held_out = open_episodes(resolved)
    passed("dataset", describe_dataset(dataset, held_out))
    model_config, data_config = fit_to_dataset(resolved, dataset.info)
    passed("action and state", f"{dataset.info.action_dim} and {dataset.info.state_dim} dimensions")
    check_cameras(data_config.cameras, dataset.info)
    passed("cameras", ", ".join(dataset.info.cameras) or "none")
    tokenizer = load_tokenizer(resolved)
    if tokenizer is not None:
        passed("tokenizer", f"{tokenizer.path}, {tokenizer.vocab_size} entries")
    check_stored_statistics(dataset)
    official = getattr(resolved.family.processing, "official", None)
    given = None
    if official is not None:
        data_config, given = official(model_config, data_config, dataset.info, parts_of(dataset))
    prepared = prepare(dataset, data_config, getattr(model_config, "action_horizon", 1), given)
    statistics, normalizers, rows = prepared.statistics, prepared.normalizers, prepared.rows
    passed("statistics", statistics.origin)
    notes = norm_table.check(rows, resolved.args.allow_extreme_norm)
    passed("normalisation", f"{len(rows)} dimensions" + (f", {len(notes)} of them unsafe" if notes else ""))
    info = dataset.info
    if resolved.args.robot_type is not None:
        info = replace(info, robot_type=resolved.args.robot_type)
    processing = resolved.family.processing(model_config, data_config, normalizers, tokenizer, info)
    if hasattr(processing, "bind"):  # caches of encoded features must be this dataset's
        for part in (dataset, held_out):
            if part is not None:
                processing.bind(part)
    contract = resolved.family.model.contract(model_config)
    notes += [*getattr(dataset, "notes", ()), *getattr(processing, "notes", ()), *doubtful(resolved, dataset)]
    notes += cut_prompts(processing, dataset, held_out)
    return Setup(
        resolved, device, dataset, held_out, model_config, data_config, contract, processing, normalizers,
        statistics, tokenizer, rows, notes,
    )  # fmt: skip


def _synthetic(resolved: Resolved, device: torch.device, passed: Callable[[str, str], None]) -> Setup:
    contract = resolved.family.model.contract(resolved.model_config)
    dataset = DummyDataset(resolved.args.num_samples)
    passed("dataset", f"{len(dataset)} synthetic samples, made from the batch contract")
    return Setup(
        resolved, device, dataset, None, resolved.model_config, resolved.data_config, contract,
        DummyProcessing(contract), NormalizerSet({}),
    )  # fmt: skip


def pick_device(name: str) -> torch.device:
    """``auto`` takes the process's GPU when there is one; UserError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device is '{name}': give auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= found:
            raise UserError(f"--device is '{name}', but this machine has {found} CUDA devices that torch can use.")
    elif device.type != "cpu":
        raise UserError(f"--device is '{name}': give auto, cpu, cuda or cuda:N.")
    return device


# ------------------------------------------------------------------------------------------------- data


def check_strategy(resolved: Resolved) -> None:
    """``--dataset-strategy`` is the model's own: each family builds its samples itself."""
    strategy, name = resolved.args.dataset_strategy, resolved.family.name
    if strategy not in ("default", name) and not strategy.startswith(f"{name}_"):
        raise UserError(f"--dataset-strategy {strategy} belongs to another model than {name}: leave it out.")


def open_episodes(resolved: Resolved) -> tuple[Dataset, Dataset | None]:
    """The training episodes and the held-out ones."""
    args = resolved.args
    if args.dataset_path is None:
        raise UserError("No dataset was given: name its folder with --dataset-path, or use dummy_datasets.")
    whole = _open(resolved, args.episodes)
    if args.eval_episodes is None:
        return whole, None
    numbers = [episode.index for episode in whole.episodes]
    held = held_out_numbers(args.eval_episodes, numbers)
    kept = [number for number in numbers if number not in set(held)]
    return _open(resolved, kept), _open(resolved, held)


def _open(resolved: Resolved, episodes: Sequence[int] | str | None) -> Dataset:
    args, data = resolved.args, resolved.data_config
    return open_dataset(
        args.dataset_path,
        format=args.dataset_format,
        version=args.lerobotdataset_version if args.was_set("lerobotdataset_version") else None,
        episodes=episodes,
        split=args.split,
        video_backend=args.video_backend if args.was_set("video_backend") else None,
        action_key=data.action_key,
        state_key=data.state_key,
        language_key=data.language_key,
        image_layout=data.image_layout,
        hdf5_layout=data.hdf5_layout,
        fps=data.fps,
    )


def held_out_numbers(text: str, numbers: Sequence[int]) -> list[int]:
    """``last:2``, or numbers and ranges like ``3,7:9``, out of the dataset's episode `numbers`."""
    if text.startswith("last:"):
        count = text.removeprefix("last:")
        if not count.isdigit() or int(count) < 1:
            raise UserError(f"--eval-episodes is '{text}': it must be last:N with N at least 1, or numbers like 3,7:9.")
        held = list(numbers[-int(count) :])
    else:
        held = parse_ranges(text)
        if unknown := [number for number in held if number not in numbers]:
            raise UserError(
                f"--eval-episodes names episode {unknown[0]}, which is not among the {len(numbers)} chosen."
            )
    if len(held) >= len(numbers):
        raise UserError(f"--eval-episodes {text} holds out all {len(numbers)} episodes: leave some to train on.")
    return held


def describe_dataset(dataset: Dataset, held_out: Dataset | None) -> str:
    info = dataset.info
    parts = [f"{info.path}: {info.format.removesuffix('_datasets')} {info.version}"]
    parts.append(f"{len(dataset.episodes)} episodes, {len(dataset)} frames at {info.fps:g}/s")
    if held_out is not None:
        names = ", ".join(str(episode.index) for episode in held_out.episodes)
        parts.append(f"held out: episode {names}, {len(held_out)} frames")
    return ", ".join(parts)


def parts_of(dataset: Dataset) -> dict[str, DatasetInfo]:
    """The datasets of a mixture by embodiment; empty for a dataset alone."""
    return {part.embodiment: part.dataset.info for part in getattr(dataset, "parts", ())}


def fit_to_dataset(resolved: Resolved, info: DatasetInfo) -> tuple[Any, Any]:
    """The configurations with `action_dim` and `state_dim` taken from the dataset where they are None."""
    model, changes = resolved.model_config, {}
    for name in ("action_dim", "state_dim"):
        given, found = getattr(model, name, 0), getattr(info, name)
        most = getattr(model, f"max_{name}", None)
        what = name.removesuffix("_dim")
        if most is not None and found > most:
            raise UserError(
                f"The dataset's {what} has {found} dimensions, more than the {most} of the model: "
                f"raise model.max_{name} (with --pretrained-checkpoint it is fixed) or choose another data.{what}_key."
            )
        if given is None and found:
            changes[name] = found
        elif given and found and given != found and name == "action_dim":
            raise UserError(
                f"model.{name} is {given}, but the dataset's {what} has {found} dimensions: set model.{name}={found}."
            )
    return replace(model, **changes), resolved.data_config


def check_cameras(cameras: dict[str, str], info: DatasetInfo) -> None:
    """Every camera that `data.cameras` names is in the dataset."""
    for slot, name in cameras.items():
        if name not in info.cameras:
            close = nearest(name, info.cameras, 1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            listed = ", ".join(info.cameras) or "none"
            raise UserError(f"data.cameras.{slot} is '{name}'{hint}, but the dataset's cameras are: {listed}.")


def doubtful(resolved: Resolved, dataset: Dataset) -> Iterator[str]:
    """What was set, and does with this dataset and family hardly what was meant."""
    args, data, family = resolved.args, resolved.data_config, resolved.family
    if dataset.info.format == "lerobot_datasets":
        for name in ("fps", "hdf5_layout"):
            if getattr(data, name) is not None:
                yield f"data.{name} has no effect here: it belongs to HDF5 recordings."
    if args.robot_type is not None and not getattr(family.processing, "reads_robot_type", False):
        yield f"--robot-type has no effect here: {family.name} treats all robots alike."
    slots: dict[str, list[str]] = {}
    for slot, name in data.cameras.items():
        slots.setdefault(name, []).append(slot)
    for name, taken in slots.items():
        if len(taken) > 1:
            yield f"Camera '{name}' fills {len(taken)} slots ({', '.join(taken)}): the model sees one picture twice."
    horizon = getattr(resolved.model_config, "action_horizon", 1)
    longest = max(episode.length for episode in dataset.episodes)
    if horizon > longest:
        yield (
            f"model.action_horizon is {horizon}, but no episode has more than {longest} frames: the steps after them "
            "have nothing to learn from."
        )


def cut_prompts(processing: Any, *datasets: Dataset | None) -> list[str]:
    """What to say of tasks that the model would not read to their end; few and cheap, as the metadata lists them."""
    if (room := getattr(processing, "room", None)) is None:  # a family that reads no text
        return []
    tasks = dict.fromkeys(task for part in datasets if part is not None for task in part.tasks())
    return room.notes({task: processing.prompt_length(task) for task in tasks})


def load_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """The family's tokenizer, or None for a family that reads no text."""
    options = getattr(resolved.family.processing, "tokenizer_options", {})
    needed = getattr(resolved.family.processing, "tokenizer_needed", None)
    if options is None or (needed is not None and not needed(resolved.model_config)):
        return None
    path = resolved.args.tokenizer_path
    if path is None:
        raise UserError(
            f"{resolved.family.name} needs a tokenizer: give its tokenizer.json, or the folder that holds it, with "
            "--tokenizer-path."
        )
    return Tokenizer(path, **options)


def check_stored_statistics(dataset: Dataset) -> None:
    """The statistics that the dataset carries have as many values as its columns have dimensions."""
    stored = dataset.stored_statistics() or {}
    for key, dim in ((ACTION, dataset.info.action_dim), (STATE, dataset.info.state_dim)):
        for name, values in stored.get(key, {}).items():
            if name != "count" and dim and values.size != dim:
                raise UserError(
                    f"The dataset's statistics have {values.size} values for {name} of '{key}', but its rows have "
                    f"{dim} dimensions: they belong to other data. Replace them, or remove them to have them computed."
                )
