"""The files beside GR00T's weights in NVIDIA's layout, which Isaac-GR00T, LeRobot and `official` read: ``config.json``,
``processor_config.json``, ``statistics.json`` and ``embodiment_id.json``.

Facts: NVIDIA/Isaac-GR00T ``configs/model``, ``processing_gr00t_n1d7.py``. A run that went on with the statistics of an
official checkpoint hands its processor and statistics on. Else relative actions have statistics of another kind there,
by part and step: with ``data.action_mode=relative`` only ``config.json`` and ``embodiment_id.json`` are written, and
the processor is the user's to bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlaforge.data.schema import ACTION, STATE
from vlaforge.models.companions import Files, Statistics, text
from vlaforge.models.groot.config import GrootConfig, GrootDataConfig
from vlaforge.models.groot.modality import Described
from vlaforge.models.groot.official import Official, places

LANGUAGE = "annotation.human.task_description"
COLUMNS = {"state": STATE, "action": ACTION}


def nvidia(
    kind: Mapping[str, Any],
    numbers: Mapping[str, int],
    model: GrootConfig,
    data: GrootDataConfig,
    dataset: Mapping[str, Any],
    statistics: Statistics,
) -> Files:
    """See `models.companions`. `kind`: what only this version's ``config.json`` says; `numbers`: its embodiments."""
    official = Official.of(data)
    if official is not None:
        data, numbers = official.options(data, model.frame), official.numbers or numbers
    if data.embodiment_tag.isdigit():
        numbers = {**numbers, data.embodiment_tag: int(data.embodiment_tag)}
    files: Files = {
        "config.json": text({**kind, **_config(model, data)}),
        "embodiment_id.json": text(dict(numbers)),
    }
    if official is not None and official.governs and official.processor:
        settings, values = official.processor, official.statistics
    elif data.action_mode != "absolute" or ACTION not in statistics:  # a mixture's are by embodiment
        return files
    else:
        dims = {part: places(part, described(dataset), data) for part in COLUMNS}
        settings = _processor(model, data, dataset, dims)
        values = {
            part: {column: _part(statistics.get(key, {}), where) for column, where in dims[part].items()}
            for part, key in COLUMNS.items()
        }
    processor = {"processor_class": f"{kind['model_type']}Processor", "processor_kwargs": dict(settings)}
    return files | {
        "processor_config.json": text(processor),
        "statistics.json": text({data.embodiment_tag: values}),
    }


def described(dataset: Mapping[str, Any]) -> Described:
    """What a checkpoint says of its data, as `places` reads it."""
    return SimpleNamespace(**{**dataset, "path": Path(dataset.get("path", ""))})


def _part(statistics: Mapping[str, Any], where: Sequence[int]) -> dict[str, list[float]]:
    """One part's rows of every statistic but the count."""
    return {name: [row[d] for d in where] for name, row in statistics.items() if name != "count"}


def _processor(
    model: GrootConfig, data: GrootDataConfig, dataset: Mapping[str, Any], dims: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    steps = list(range(data.action_steps or model.action_horizon))
    history = list(range(1 - model.state_history_length, 1))
    absolute = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"}
    angles, deviating = list(data.sin_cos_embedding_keys), data.normalization_mode == "mean_std"
    modality: dict[str, dict[str, Any]] = {
        "video": {"delta_indices": [0], "modality_keys": list(dataset["cameras"])},
        "state": {"delta_indices": history, "modality_keys": list(dims["state"]), "sin_cos_embedding_keys": angles},
        "action": {
            "delta_indices": steps,
            "modality_keys": list(dims["action"]),
            "action_configs": [absolute for _ in dims["action"]],
        },
        "language": {"delta_indices": [0], "modality_keys": [LANGUAGE]},
    }
    for part in COLUMNS if deviating else ():
        modality[part]["mean_std_embedding_keys"] = list(dims[part])
    names = ("brightness", "contrast", "saturation", "hue")
    return {
        "modality_configs": {data.embodiment_tag: modality},
        "use_percentiles": data.normalization_mode == "q99",
        "use_mean_std": deviating,
        "clip_outliers": data.clip,
        "formalize_language": data.formalize_language,
        "use_relative_action": False,
        "apply_sincos_state_encoding": bool(angles),
        "image_target_size": list(model.frame),
        "image_crop_size": None,
        "shortest_image_edge": data.shortest_image_edge,
        "crop_fraction": data.crop_fraction,
        "letter_box_transform": data.letter_box,
        "use_albumentations": data.image_path == "albumentations",
        "random_rotation_angle": data.random_rotation_angle or None,
        "color_jitter_params": dict(zip(names, data.color_jitter)),
        "max_state_dim": model.max_state_dim,
        "max_action_dim": model.max_action_dim,
        "max_action_horizon": model.action_horizon,
        "state_dropout_prob": model.state_dropout_prob,
    }


def _config(model: GrootConfig, data: GrootDataConfig) -> dict[str, Any]:
    same = (
        "select_layer", "max_state_dim", "max_action_dim", "action_horizon", "state_history_length", "hidden_size",
        "max_num_embodiments", "max_seq_len", "add_pos_embed", "use_vlln", "use_alternate_vl_dit", "state_dropout_prob",
        "noise_beta_alpha", "noise_beta_beta", "noise_s", "num_timestep_buckets", "num_inference_timesteps", "tune_llm",
        "tune_visual", "tune_top_llm_layers", "tune_projector", "tune_diffusion_model", "tune_vlln",
    )  # fmt: skip
    dit = model.dit
    published = {"positional_embeddings": None, "final_dropout": True}
    config = {name: getattr(model, name) for name in same} | {
        "backbone_embedding_dim": model.text.width,
        "input_embedding_dim": dit.width,
        "attend_text_every_n_blocks": dit.text_every or 1,
        "formalize_language": data.formalize_language,
        "diffusion_model_cfg": {
            **published,
            "norm_type": "ada_norm",
            "interleave_self_attention": True,
            "dropout": dit.dropout,
            "num_layers": dit.layers,
            "num_attention_heads": dit.heads,
            "attention_head_dim": dit.head_dim,
            "output_dim": dit.output,
        },
    }
    if (context := model.vl_self_attention) is not None:
        config["vl_self_attention_cfg"] = {
            **published,
            "dropout": context.dropout,
            "num_layers": context.layers,
            "num_attention_heads": context.heads,
            "attention_head_dim": context.head_dim,
        }
    return config
