"""The files beside X-VLA's weights in LeRobot's layout, so that LeRobot's own policy can use a checkpoint of ours:
``config.json`` and the two processor pipelines. Formats: LeRobot 0.6.1 ``policies/xvla``.

LeRobot resizes frames only with padding (``model.image_resize=pad_left_top``); otherwise they must come as squares of
``model.image_size``, and its features say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlaforge.models.companions import Files, Statistics, features, norm_map, pipelines, text, tokenizer
from vlaforge.models.xvla.config import DataConfig, ModelConfig, domain_number


def companions(
    layout: str, model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> Files:
    """See `models.companions`; ``original`` is weights alone."""
    if layout == "original":
        return {}
    pads = model.image_resize == "pad_left_top"
    inputs, outputs = features(dataset, None if pads else (model.image_size, model.image_size))
    modes = norm_map(data.normalization_mode)
    normal = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": modes}
    domain = domain_number(data.domain, model.num_domains)
    if domain is None:
        domain = domain_number(dataset.get("robot_type"), model.num_domains, strict=False)
    before = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        tokenizer("facebook/bart-large", model.max_token_len),
        ("xvla_image_to_float", {"image_keys": None, "validate_range": True}),
        ("xvla_imagenet_normalize", {"image_keys": None}),
        ("xvla_add_domain_id", {"domain_id": domain or 0}),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
        ("normalizer_processor", normal),
    ]
    after = [
        ("unnormalizer_processor", {**normal, "features": outputs}),
        ("device_processor", {"device": "cpu", "float_dtype": None}),
    ]
    config = {
        "type": "xvla",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "dtype": "float32",
        "normalization_mapping": modes,
        "resize_imgs_with_padding": [model.image_size, model.image_size] if pads else None,
        "florence_config": _florence(model),
        **_policy(model),
    }
    return {"config.json": text(config), **pipelines(before, after, statistics)}


def _policy(model: ModelConfig) -> dict[str, Any]:
    same = (
        "hidden_size", "depth", "num_heads", "mlp_ratio", "num_domains", "len_soft_prompts", "dim_time", "max_len_seq",
        "use_hetero_proj", "action_mode", "use_proprio", "max_state_dim", "max_action_dim", "num_image_views",
    )  # fmt: skip
    return {name: getattr(model, name) for name in same} | {
        "chunk_size": model.action_horizon,
        "n_action_steps": model.action_horizon,
        "num_denoising_steps": model.num_inference_steps,
        "tokenizer_max_length": model.max_token_len,
    }


def _florence(model: ModelConfig) -> dict[str, Any]:
    """The towers in transformers' words; X-VLA has no decoder, so the least one stands there."""
    vision, language = model.vision, model.text
    return {
        "vision_config": {
            "embed_dim": list(vision.dims),
            "depths": list(vision.depths),
            "num_heads": list(vision.heads),
            "num_groups": list(vision.groups),
            "patch_size": list(vision.kernels),
            "patch_stride": list(vision.strides),
            "patch_padding": list(vision.paddings),
            "patch_prenorm": list(vision.prenorm),
            "window_size": vision.window,
            "mlp_ratio": vision.mlp_ratio,
            "drop_path_rate": vision.drop_path,
            "projection_dim": language.width,
            "max_position_embeddings": model.image_positions,
            "max_temporal_embeddings": model.image_frames,
        },
        "text_config": {
            "vocab_size": language.vocab_size,
            "d_model": language.width,
            "pad_token_id": language.pad_token,
            "encoder_layers": language.layers,
            "encoder_attention_heads": language.heads,
            "encoder_ffn_dim": language.mlp,
            "decoder_layers": 1,
            "decoder_attention_heads": language.heads,
            "decoder_ffn_dim": language.mlp,
            "max_position_embeddings": language.max_positions,
            "dropout": language.dropout,
            "attention_dropout": language.attention_dropout,
            "activation_dropout": language.activation_dropout,
        },
    }
