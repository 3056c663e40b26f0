"""The files that stand beside π0.5's weights in a public layout, so that the official code can use a checkpoint of
ours.

LeRobot 0.6: ``config.json`` and the two processor pipelines with their normalisation statistics. OpenPI:
``config.json`` and ``assets/<id>/norm_stats.json``. Formats: lerobot ``PI05Policy.save_pretrained`` and
``make_pi05_pre_post_processors``, openpi ``shared/normalize.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlaforge.models.companions import Files, Statistics, features, norm_map, pipelines, text, tokenizer
from vlaforge.models.pi05.config import DataConfig, ModelConfig

ASSET = "vlaforge"


def companions(
    layout: str, model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> Files:
    """See `models.companions`; `layout` is ``lerobot`` or ``openpi``."""
    return _openpi(model, statistics) if layout == "openpi" else _lerobot(model, data, dataset, statistics)


# ------------------------------------------------------------------------------------------- lerobot


def _lerobot(model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics) -> Files:
    inputs, outputs = features(dataset)
    modes = norm_map(data.normalization_mode)
    normal = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": modes}
    relative = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    before = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        ("relative_actions_processor", relative),
        ("normalizer_processor", normal),
        ("pi05_prepare_state_tokenizer_processor_step", {}),
        tokenizer("google/paligemma-3b-pt-224", model.max_token_len),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
    ]
    after = [
        ("unnormalizer_processor", {**normal, "features": outputs}),
        ("absolute_actions_processor", {"enabled": False}),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
    ]
    config = text(_lerobot_config(model, inputs, outputs, modes))
    return {"config.json": config, **pipelines(before, after, statistics)}


def _lerobot_config(model: ModelConfig, inputs: dict, outputs: dict, modes: dict) -> dict[str, Any]:
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
        "normalization_mapping": modes,
    }


# ------------------------------------------------------------------------------------------- openpi


def _openpi(model: ModelConfig, statistics: Statistics) -> Files:
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
    return {"config.json": text(config), f"assets/{ASSET}/norm_stats.json": text({"norm_stats": stats})}
