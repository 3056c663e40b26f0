"""The files of LeRobot's that are the same beside every policy's weights: features, statistics, processor pipelines.

A family's ``companions.py`` says what its public layouts have beside the weights:

    companions(layout, model, data, dataset, statistics) -> {file name: text, or tensors of a safetensors file}

`dataset` is what a checkpoint says of its data (``cameras`` in use, name → {height, width}, ``action_dim``,
``state_dim``, ``robot_type``, ...), `statistics` those of the training episodes, after the action transform. An empty
answer means that the layout is weights alone. Formats: LeRobot 0.6.1 ``PreTrainedConfig``, ``PolicyProcessorPipeline``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Statistics = Mapping[str, Mapping[str, Any]]
"""``action`` and ``observation.state`` → name → list of numbers."""
Files = dict[str, str | dict[str, Tensor]]
Step = tuple[str, dict[str, Any]]
"""LeRobot's name of a processor step, and its settings."""

MODES = {"q99": "QUANTILES", "min_max": "MIN_MAX", "mean_std": "MEAN_STD", "identity": "IDENTITY"}
"""Our normalisation modes in LeRobot's words."""
WITH_STATISTICS = ("normalizer_processor", "unnormalizer_processor", "groot_n1_7_pack_inputs_v1")


def features(
    dataset: Mapping[str, Any], size: tuple[int, int] | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """(inputs, outputs) of a policy; `size`: height and width of frames, where they are not the dataset's."""
    inputs = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, *(size or (frame["height"], frame["width"]))]}
        for name, frame in dataset["cameras"].items()
    }
    inputs["observation.state"] = {"type": "STATE", "shape": [dataset["state_dim"]]}
    return inputs, {"action": {"type": "ACTION", "shape": [dataset["action_dim"]]}}


def norm_map(mode: str) -> dict[str, str]:
    """How each kind of feature is normalised; images are left to the policy."""
    known = MODES.get(mode, "QUANTILES")
    return {"VISUAL": "IDENTITY", "STATE": known, "ACTION": known}


def pipelines(before: Sequence[Step], after: Sequence[Step], statistics: Statistics) -> Files:
    """Both pipelines of a policy, and the statistics of the steps that use them."""
    values = {
        f"{key}.{name}": torch.tensor(row, dtype=torch.float32)
        for key, entry in statistics.items()
        for name, row in entry.items()
        if name in ("mean", "std", "min", "max", "q01", "q99")
    }
    files: Files = {}
    for pipeline, steps in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        entries = []
        for number, (name, config) in enumerate(steps):
            entry: dict[str, Any] = {"registry_name": name, "config": config}
            if name in WITH_STATISTICS:
                entry["state_file"] = f"{pipeline}_step_{number}_{name}.safetensors"
                files[entry["state_file"]] = values
            entries.append(entry)
        files[f"{pipeline}.json"] = text({"name": pipeline, "steps": entries})
    return files


def tokenizer(name: str, length: int, **settings: Any) -> Step:
    """The step that turns the task into `length` ids with the tokenizer `name`."""
    config = {"max_length": length, "task_key": "task", "padding_side": "right", "padding": "max_length"}
    return "tokenizer_processor", {**config, "truncation": True, "tokenizer_name": name, **settings}


def text(content: Any) -> str:
    """JSON as it stands in a file."""
    return json.dumps(content, indent=2) + "\n"
