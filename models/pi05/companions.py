"""The files that stand beside π0.5's weights in a public layout, so that the official code can use a checkpoint of
ours.

LeRobot 0.6: ``config.json`` and the two processor pipelines with their normalisation statistics. OpenPI:
``config.json`` and ``assets/<id>/norm_stats.json``. Formats: lerobot ``PI05Policy.save_pretrained`` and
``make_pi05_pre_post_processors``, openpi ``shared/normalize.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlaforge.models.pi05.config import DataConfig, ModelConfig

Statistics = Mapping[str, Mapping[str, Any]]
"""``action`` and ``observation.state`` → name → list of numbers."""
MODES = {"q99": "QUANTILES", "min_max": "MIN_MAX", "mean_std": "MEAN_STD", "identity": "IDENTITY"}
PREPROCESSOR_STATE = "policy_preprocessor_step_3_normalizer_processor.safetensors"
POSTPROCESSOR_STATE = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
ASSET = "vlaforge"


def companions(
    layout: str, model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> dict[str, str | dict[str, Tensor]]:
    """File name → text, or tensors of a safetensors file.

    Args:
        layout: ``lerobot`` or ``openpi``.
        dataset: what a checkpoint says of its data: ``cameras`` (of the slots in order, name → {height, width}),
            ``action_dim``, ``state_dim``.
        statistics: of the training episodes, after the action transform.
    """
    return _openpi(model, statistics) if layout == "openpi" else _lerobot(model, data, dataset, statistics)


# ------------------------------------------------------------------------------------------- lerobot


def _lerobot(
    model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> dict[str, str | dict[str, Tensor]]:
    images = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, size["height"], size["width"]]}
        for name, size in dataset["cameras"].items()
    }
    inputs = {**images, "observation.state": {"type": "STATE", "shape": [dataset["state_dim"]]}}
    outputs = {"action": {"type": "ACTION", "shape": [dataset["action_dim"]]}}
    mode = MODES.get(data.normalization_mode, "QUANTILES")
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    values = {
        f"{key}.{name}": torch.tensor(row, dtype=torch.float32)
        for key, entry in statistics.items()
        for name, row in entry.items()
        if name in ("mean", "std", "min", "max", "q01", "q99")
    }
    return {
        "config.json": _text(_lerobot_config(model, inputs, outputs, norm_map)),
        "policy_preprocessor.json": _text(_preprocessor(model, {**inputs, **outputs}, norm_map)),
        "policy_postprocessor.json": _text(_postprocessor(outputs, norm_map)),
        PREPROCESSOR_STATE: values,
        POSTPROCESSOR_STATE: values,
    }


def _lerobot_config(model: ModelConfig, inputs: dict, outputs: dict, norm_map: dict) -> dict[str, Any]:
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": model.action_horizon,
        "n_action_steps": model.action_horizon,
        "max_state_dim": model.max_state_dim,
        "max_action_dim": model.max_action_dim,
        "num_inference_steps": model.num_inference_steps,
        "time_sampling_beta_alpha": model.time_alpha,
        "time_sampling_beta_beta": model.time_beta,
        "time_sampling_scale": model.time_scale,
        "time_sampling_offset": model.time_offset,
        "min_period": model.min_period,
        "max_period": model.max_period,
        "image_resolution": [model.image_size, model.image_size],
        "tokenizer_max_length": model.max_token_len,
        "normalization_mapping": norm_map,
    }


def _preprocessor(model: ModelConfig, features: dict, norm_map: dict) -> dict[str, Any]:
    relative = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    tokenizer = {
        "max_length": model.max_token_len,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "google/paligemma-3b-pt-224",
    }
    normalizer = {"eps": 1e-8, "features": features, "norm_map": norm_map}
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "relative_actions_processor", "config": relative},
        {"registry_name": "normalizer_processor", "config": normalizer, "state_file": PREPROCESSOR_STATE},
        {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
        {"registry_name": "tokenizer_processor", "config": tokenizer},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    return {"name": "policy_preprocessor", "steps": steps}


def _postprocessor(outputs: dict, norm_map: dict) -> dict[str, Any]:
    normalizer = {"eps": 1e-8, "features": outputs, "norm_map": norm_map}
    steps = [
        {"registry_name": "unnormalizer_processor", "config": normalizer, "state_file": POSTPROCESSOR_STATE},
        {"registry_name": "absolute_actions_processor", "config": {"enabled": False}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    return {"name": "policy_postprocessor", "steps": steps}


# ------------------------------------------------------------------------------------------- openpi


def _openpi(model: ModelConfig, statistics: Statistics) -> dict[str, str | dict[str, Tensor]]:
    names = {"observation.state": "state", "action": "actions"}
    stats = {
        ours: {name: list(entry[name]) for name in ("mean", "std", "q01", "q99") if name in entry}
        for key, ours in names.items()
        if (entry := statistics.get(key)) is not None
    }
    config = {
        "action_dim": model.max_action_dim,
        "action_horizon": model.action_horizon,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "float32",
    }
    return {"config.json": _text(config), f"assets/{ASSET}/norm_stats.json": _text({"norm_stats": stats})}


def _text(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"
