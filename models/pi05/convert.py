"""π0.5's public checkpoint layouts: LeRobot's and OpenPI's. They differ in the ``model.`` that LeRobot puts in front.

The hub's ``lerobot/pi05_base`` has no prefix, checkpoints that LeRobot's training saves have it; both load as either.
Both hold the token embedding once, under the name of the (unused) language head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vlaforge.models.convert import Layout, Rule, State

PALI = "paligemma_with_expert.paligemma"
EXPERT = "paligemma_with_expert.gemma_expert"
VISION = f"{PALI}.model.vision_tower.vision_model"
TEXT = f"{PALI}.model.language_model"
EXPERT_HEAD = f"{EXPERT}.lm_head.weight"


def _rules() -> tuple[Rule, ...]:
    layer, block, joint = f"{VISION}.encoder.layers.{{i}}", "vision.layers.{i}", "layers.{i}"
    rules = [
        Rule(f"{VISION}.embeddings.patch_embedding.{{rest}}", "vision.patch.{rest}"),
        Rule(f"{VISION}.embeddings.position_embedding.weight", "vision.positions.weight"),
        Rule(f"{layer}.layer_norm1.{{rest}}", f"{block}.norm1.{{rest}}"),
        Rule(f"{layer}.layer_norm2.{{rest}}", f"{block}.norm2.{{rest}}"),
        Rule(f"{layer}.self_attn.out_proj.{{rest}}", f"{block}.out_proj.{{rest}}"),
        *(Rule(f"{layer}.self_attn.{n}_proj.{{rest}}", f"{block}.qkv.{n}_proj.{{rest}}") for n in "qkv"),
        Rule(f"{layer}.mlp.{{rest}}", f"{block}.mlp.{{rest}}"),
        Rule(f"{VISION}.post_layernorm.{{rest}}", "vision.norm.{rest}"),
        Rule(f"{PALI}.model.multi_modal_projector.linear.{{rest}}", "projector.{rest}"),
        Rule(f"{TEXT}.embed_tokens.weight", "embed.weight"),
        Rule(f"{TEXT}.norm.weight", "norm.weight"),
        Rule(f"{EXPERT}.model.norm.dense.{{rest}}", "expert_norm.dense.{rest}"),
        Rule(EXPERT_HEAD, "expert_lm_head.weight"),
        Rule("time_mlp_in.{rest}", "time.time_in.{rest}"),
        Rule("time_mlp_out.{rest}", "time.time_out.{rest}"),
        Rule("action_in_proj.{rest}", "action_in.{rest}"),
        Rule("action_out_proj.{rest}", "action_out.{rest}"),
    ]
    for tower, half, norm in ((TEXT, "language", ""), (f"{EXPERT}.model", "expert", "dense.")):
        theirs, ours = f"{tower}.layers.{{i}}", f"{joint}.{half}"
        rules += [
            Rule(f"{theirs}.input_layernorm.{norm}{{rest}}", f"{ours}.input_norm.{norm}{{rest}}"),
            Rule(f"{theirs}.post_attention_layernorm.{norm}{{rest}}", f"{ours}.post_norm.{norm}{{rest}}"),
            *(Rule(f"{theirs}.self_attn.{n}_proj.weight", f"{ours}.qkv.{n}_proj.weight") for n in "qkv"),
            Rule(f"{theirs}.self_attn.o_proj.weight", f"{ours}.o_proj.weight"),
            Rule(f"{theirs}.mlp.{{rest}}", f"{ours}.mlp.{{rest}}"),
        ]
    return tuple(rules)


def _expert_head(state: Mapping[str, Tensor]) -> State:
    """The expert's unused output head as zeros, where the model was built without it."""
    if "expert_lm_head.weight" in state:
        return {}
    embed, width = state["embed.weight"], state["action_in.weight"].shape[0]
    return {EXPERT_HEAD: torch.zeros(embed.shape[0], width, dtype=embed.dtype, device=embed.device)}


def _layout(name: str, prefix: str) -> Layout:
    return Layout(
        name=name,
        rules=_rules(),
        prefix=prefix,
        renames=(
            ("model.paligemma_with_expert.", "paligemma_with_expert."),
            ("action_time_mlp_in.", "time_mlp_in."),
            ("action_time_mlp_out.", "time_mlp_out."),
            # transformers before 4.52 had the towers of PaliGemma at its top level.
            (f"{PALI}.vision_tower.", f"{PALI}.model.vision_tower."),
            (f"{PALI}.multi_modal_projector.", f"{PALI}.model.multi_modal_projector."),
            (f"{PALI}.language_model.model.", f"{TEXT}."),
            (f"{PALI}.language_model.lm_head.", f"{PALI}.lm_head."),
        ),
        ties={"embed.weight": (f"{PALI}.lm_head.weight",)},
        skips={
            "state_proj.*": "π0.5 writes the state into the prompt",
            f"{EXPERT}.model.layers.*.input_layernorm.weight": "π0.5 modulates this norm; it has no weight",
            f"{EXPERT}.model.layers.*.post_attention_layernorm.weight": "π0.5 modulates this norm; it has no weight",
            f"{EXPERT}.model.norm.weight": "π0.5 modulates this norm; it has no weight",
        },
        optional={"expert_lm_head.weight": "never used, and model.expert_lm_head is off"},
        extra=_expert_head,
    )


LAYOUTS = {"lerobot": _layout("lerobot", "model."), "openpi": _layout("openpi", "")}
