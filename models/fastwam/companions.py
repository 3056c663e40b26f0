"""The files beside FastWAM's weights in LeRobot's layout: ``config.json`` and the two processor pipelines. Formats:
LeRobot 0.6.1 ``policies/fastwam``.

LeRobot's policy predicts actions of denoised-action variants alone (``uncond``), puts cameras in a row, and knows no
padded dimensions; where a checkpoint is of another kind its weights go alone, and the frozen encoders come from their
own public places either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vlaforge.models.companions import Files, Statistics, features, norm_map, pipelines, text
from vlaforge.models.fastwam.config import DataConfig, ModelConfig


def companions(
    layout: str, model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> Files:
    """See `models.companions`; ``release`` is weights alone."""
    whole = (model.max_action_dim, model.max_state_dim) == (dataset["action_dim"], dataset["state_dim"])
    if layout != "lerobot" or model.variant != "uncond" or model.layout != "row" or not whole:
        return {}
    inputs, outputs = features(dataset, (model.height, model.width // max(1, len(dataset["cameras"]))))
    modes = norm_map(data.normalization_mode)
    normal = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": modes}
    to_cpu = ("device_processor", {"device": "cpu", "float_dtype": None})
    before = [
        ("rename_observations_processor", {"rename_map": {}}),
        ("to_batch_processor", {}),
        to_cpu,
        ("normalizer_processor", normal),
    ]
    after = [("unnormalizer_processor", {**normal, "features": outputs}), to_cpu]
    config = {
        "type": "fastwam",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "device": "cpu",
        "torch_dtype": "float32",
        "normalization_mapping": modes,
        **_sizes(model, data),
    }
    return {"config.json": text(config), **pipelines(before, after, statistics)}


def _sizes(model: ModelConfig, data: DataConfig) -> dict[str, Any]:
    shared = {
        "num_heads": model.heads,
        "attn_head_dim": model.head_dim,
        "num_layers": model.layers,
        "text_dim": model.text_dim,
        "freq_dim": model.freq_dim,
        "eps": model.eps,
        "use_gradient_checkpointing": False,
        "fp32_attention": True,
    }
    video = {
        **shared,
        "patch_size": list(model.patch),
        "in_dim": model.latent_channels,
        "out_dim": model.latent_channels,
        "hidden_dim": model.video.dim,
        "ffn_dim": model.video.ffn_dim,
        "seperated_timestep": True,  # the official spelling
        "video_attention_mask_mode": model.video_attention,
        "action_conditioned": False,
        "action_dim": model.max_action_dim,
        "action_group_causal_mask_mode": "group_diagonal",
    }
    action = {
        **shared,
        "action_dim": model.max_action_dim,
        "hidden_dim": model.action.dim,
        "ffn_dim": model.action.ffn_dim,
    }
    return {
        "action_dim": model.max_action_dim,
        "proprio_dim": model.max_state_dim or None,
        "action_horizon": model.action_horizon,
        "n_action_steps": model.action_horizon,
        "num_video_frames": (model.video_frames - 1) * model.frame_stride + 1,
        "action_video_freq_ratio": model.frame_stride,
        "image_size": [model.height, model.width],
        "context_len": model.text_tokens,
        "tokenizer_max_len": model.text_tokens,
        "prompt_template": data.prompt,
        "num_inference_steps": model.num_inference_steps,
        "base_model_id": None,
        "video_scheduler": asdict(model.video_schedule),
        "action_scheduler": asdict(model.action_schedule),
        "loss": {"lambda_video": model.lambda_video, "lambda_action": model.lambda_action},
        "video_dit_config": video,
        "action_dit_config": action,
    }
