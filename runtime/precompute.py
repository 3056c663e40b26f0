"""`forge-data precompute`: what a model's frozen encoders make of a dataset, written as a cache (see `data.cache`).

    forge-data precompute --model fastwam --dataset-path DATA --output CACHE [flags and dotlists of forge-run]
    forge-data precompute --verify CACHE            compare every byte with the manifest

The configuration is that of the training run: its settings go into the manifest, and a run that reads the cache with
others stops. An interrupted run continues when it is started again with the same words.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from vlaforge.data.cache import CacheSpec, verify
from vlaforge.data.cache_writer import CacheWriter
from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import TASK, Batch, DataNeeds, sample_rng
from vlaforge.runtime.config import Resolved, resolve
from vlaforge.runtime.setup import Setup, build_setup


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge-data precompute",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", metavar="CACHE", help="new folder for the cache, outside of the dataset")
    parser.add_argument("--fields", metavar="NAME,...", help="what to cache (default: all that the family can)")
    parser.add_argument("--shard-rows", type=int, default=512, metavar="N", help="samples a file (default 512)")
    parser.add_argument("--verify", metavar="CACHE", help="only compare a cache's files with its manifest")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the words after ``precompute``; returns the exit code. UserError for what cannot be used."""
    own, rest = parser().parse_known_args(argv)
    if own.verify:
        print(f"{verify(Path(own.verify).expanduser())} files of '{own.verify}' are as their manifest says")
        return 0
    if not own.output:
        raise UserError("No folder for the cache was given: name one with --output.")
    setup = encoding_setup(resolve(rest))
    spec = setup.processing.cache_spec()
    fields = _chosen(own.fields, spec)
    with torch.device("meta"):  # only the encoders run, and they are built apart from the model
        model = setup.resolved.family.model(setup.model_config)
    made_with = {"torch": torch.__version__, "device": str(setup.device)}
    writer = CacheWriter(own.output, spec, fields, setup.dataset, own.shard_rows, made_with)
    texts = [name for name in fields if name in spec.texts]
    rows = [name for name in fields if name in spec.rows]
    if texts and not writer.prompts:
        write_texts(writer, setup, model, spec, texts)
    if rows:
        write_rows(writer, setup, model, spec, rows)
    folder = writer.finish()
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    print(f"{folder}: {len(writer.done())} samples, {len(writer.prompts)} prompts, {size:.1f} MB")
    print(f"Train from it with: {setup.processing.cache_words(folder, fields)}")
    return 0


def encoding_setup(resolved: Resolved) -> Setup:
    """The setup of a run whose batches hold what encoders read, over all episodes of the selection."""
    make = getattr(resolved.family.processing, "encoding_configs", None)
    if make is None:
        raise UserError(f"{resolved.family.name} has no frozen encoders whose work could be cached.")
    model_config, data_config = make(resolved.model_config, resolved.data_config)
    args = replace(resolved.args, eval_episodes=None)
    return build_setup(replace(resolved, args=args, model_config=model_config, data_config=data_config))


def _chosen(text: str | None, spec: CacheSpec) -> list[str]:
    known = [*spec.rows, *spec.texts]
    if text is None:
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown("field", name, known)
    # Fields that are stored as they are belong to those that are encoded from the same samples.
    plain = [name for name, inputs in spec.rows.items() if not inputs]
    return [*names, *(name for name in plain if name not in names and any(n in spec.rows for n in names))]


def write_texts(writer: CacheWriter, setup: Setup, model: Any, spec: CacheSpec, names: Sequence[str]) -> None:
    """Encodes each distinct prompt once."""
    prompts = sorted({setup.processing.prompt(task) for task in _tasks(setup.dataset)})
    made: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    masks = []
    for prompt in prompts:
        fields = setup.processing.tokens(prompt)
        one = {name: value[None] for name, value in fields.items()}
        for name in names:
            made[name].append(encode(model, name, setup.device, one))
        masks.append(torch.from_numpy(fields["token_mask"])[None])
    writer.add_texts(prompts, {name: torch.cat(parts) for name, parts in made.items()}, torch.cat(masks))
    print(f"{len(prompts)} prompts encoded")


def _tasks(dataset: Dataset) -> Iterator[str]:
    """All task texts: the episodes' own, and where an episode names none or several, those of its rows."""
    position = 0
    for episode in dataset.episodes:
        yield from episode.tasks
        if len(episode.tasks) != 1:
            for row in range(position, position + episode.length):
                yield str(dataset.get(row, DataNeeds(cameras=())).get(TASK, ""))
        position += episode.length


class Rows(torch.utils.data.Dataset):
    """Samples as fields, by position; the work of loader processes."""

    def __init__(self, setup: Setup, positions: np.ndarray, names: Sequence[str]):
        self.dataset, self.processing = setup.dataset, setup.processing
        self.positions, self.names, self.needs = positions, names, setup.processing.needs()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, at: int) -> dict[str, np.ndarray]:
        position = int(self.positions[at])
        row = self.dataset.row_id(position)
        sample = self.dataset.get(position, self.needs)
        fields = self.processing.sample(sample, sample_rng(0, 0, row, "augment"), False)
        return {"row": np.int64(row), **{name: fields[name] for name in self.names}}


def write_rows(writer: CacheWriter, setup: Setup, model: Any, spec: CacheSpec, names: Sequence[str]) -> None:
    """Encodes every sample that is not stored yet, and says how far it is."""
    rows = np.array([setup.dataset.row_id(position) for position in range(len(setup.dataset))])
    todo = np.flatnonzero(~np.isin(rows, writer.done()))
    if len(todo) < len(rows):
        print(f"{len(rows) - len(todo)} of {len(rows)} samples are there already")
    inputs = [source for name in names for source in spec.rows[name]]
    plain = [name for name in names if not spec.rows[name]]
    loader = DataLoader(
        Rows(setup, todo, [*inputs, *plain]), batch_size=8, num_workers=setup.args.num_workers, collate_fn=_stack
    )
    started = told = time.monotonic()
    finished = 0
    for batch in loader:
        made = {name: encode(model, name, setup.device, batch) for name in names if name not in plain}
        writer.add_rows(batch["row"], {**made, **{name: torch.from_numpy(batch[name]) for name in plain}})
        finished += len(batch["row"])
        if time.monotonic() - told > 10 or finished == len(todo):
            told = time.monotonic()
            print(f"{finished} of {len(todo)} samples, {finished / (told - started):.1f}/s", flush=True)


def encode(model: Any, name: str, device: torch.device, fields: Mapping[str, np.ndarray]) -> torch.Tensor:
    """One frozen field of a batch, as the training step would make it."""
    batch = Batch({key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in fields.items()})
    with torch.no_grad():
        return model.frozen_fields[name][1](batch.to(device)).cpu()


def _stack(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
