"""The files beside GR00T N1.7's weights: NVIDIA's, see `models.groot.companions`, and LeRobot's.

LeRobot's policy is built on a checkpoint of NVIDIA's layout (`base_model_path`), which is the published one in its
``config.json``: for a model of another size, export it in NVIDIA's layout as well and name that folder. Facts: LeRobot
0.6.1 ``configuration_groot.py``, ``processor_groot.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vlaforge.data.schema import ACTION, STATE
from vlaforge.models.companions import Files, Statistics, features, pipelines, text
from vlaforge.models.groot.companions import described, nvidia
from vlaforge.models.groot.official import Official, places
from vlaforge.models.groot_n1_7.config import EMBODIMENTS, DataConfig, ModelConfig

KIND = {
    "architectures": ["Gr00tN1d7"],
    "model_type": "Gr00tN1d7",
    "backbone_model_type": "qwen",
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "use_vl_self_attention": True,
}
IMAGES = (
    "image_target_size", "image_crop_size", "shortest_image_edge", "crop_fraction", "use_albumentations",
    "letter_box_transform",
)  # fmt: skip


def companions(
    layout: str, model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> Files:
    """See `models.companions`. LeRobot's layout is weights alone where its pipelines cannot do what the run's did:
    states as sine and cosine, normalisation by mean and deviation, parts in another order than the dataset's."""
    files = nvidia(KIND, EMBODIMENTS, model, data, dataset, statistics)
    if layout != "lerobot":
        return files
    given = {name: json.loads(content) for name, content in files.items() if isinstance(content, str)}
    settings = given.get("processor_config.json", {}).get("processor_kwargs", {})
    modality = settings.get("modality_configs", {}).get(data.embodiment_tag, {})
    info, official = described(dataset), Official.of(data)
    ordered = all(
        [d for part in places(kind, info, data, official).values() for d in part] == list(range(dim))
        for kind, dim in (("state", info.state_dim), ("action", info.action_dim))
    )
    others = [modality.get(kind, {}).get("mean_std_embedding_keys") for kind in ("state", "action")]
    angles = settings.get("apply_sincos_state_encoding") and modality["state"].get("sin_cos_embedding_keys")
    if not (modality and ordered) or any(others) or angles:
        return {}
    return _lerobot(model, data, dataset, given, settings, modality)


def _lerobot(
    model: ModelConfig,
    data: DataConfig,
    dataset: Mapping[str, Any],
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    modality: Mapping[str, Any],
) -> Files:
    """`given`: NVIDIA's files; `settings` and `modality`: its processor's, and the embodiment's part of them."""
    inputs, outputs = features(dataset)
    tag, steps = data.embodiment_tag, len(modality["action"]["delta_indices"])
    raw = given["statistics.json"][tag]
    names = ("q01", "q99") if settings.get("use_percentiles") else ("min", "max")
    flat = {
        column: {
            ours: [value for part in modality[kind]["modality_keys"] for value in raw[kind][part].get(name, ())]
            for ours, name in zip(("min", "max"), names)
        }
        for kind, column in (("state", STATE), ("action", ACTION))
    }
    widths = {"max_state_dim": model.max_state_dim, "max_action_dim": model.max_action_dim}
    shared = {"raw_stats": raw, "modality_config": modality, "use_percentiles": bool(settings.get("use_percentiles"))}
    pack = {
        **widths, **shared, "action_horizon": model.action_horizon, "valid_action_horizon": steps, "video_horizon": 1,
        "formalize_language": settings.get("formalize_language", True), "embodiment_tag": tag,
        "embodiment_mapping": given["embodiment_id.json"], "state_dropout_prob": model.state_dropout_prob,
        "clip_outliers": settings.get("clip_outliers", True), "video_modality_keys": list(dataset["cameras"]),
    }  # fmt: skip
    images = {name: settings.get(name) for name in IMAGES} | {"model_name": KIND["model_name"], "device": "cpu"}
    device = ("device_processor", {"device": "cpu", "float_dtype": None})
    relative = bool(settings.get("use_relative_action"))
    decode = {**shared, "env_action_dim": dataset["action_dim"], "use_relative_action": relative}
    before = [
        ("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {}),
        ("groot_n1_7_pack_inputs_v1", pack), ("groot_n1_7_vlm_encode_v1", images), device,
    ]  # fmt: skip
    config = {
        "type": "groot",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "chunk_size": steps,
        "n_action_steps": steps,
        **widths,
        "normalization_mapping": dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY"),
        "base_model_path": "nvidia/GR00T-N1.7-3B",
        "embodiment_tag": tag,
        "num_inference_timesteps": model.num_inference_timesteps,
        "use_relative_actions": relative,
    }
    return {"config.json": text(config), **pipelines(before, [("groot_n1_7_action_decode_v1", decode), device], flat)}
