"""GR00T N1.6's public checkpoint layouts: NVIDIA's, and LeRobot's, which puts ``_groot_model.`` in front."""

from __future__ import annotations

from vlaforge.models.convert import Rule
from vlaforge.models.groot.convert import language_rules, layouts

MODEL = "backbone.model"
VISION = f"{MODEL}.vision_model.vision_model"


def _rules() -> list[Rule]:
    layer, ours = f"{VISION}.encoder.layers.{{i}}", "vision.layers.{i}"
    return [
        Rule(f"{VISION}.embeddings.patch_embedding.{{rest}}", "vision.patch_embed.{rest}"),
        Rule(f"{VISION}.embeddings.position_embedding.weight", "vision.positions.weight"),
        *(Rule(f"{layer}.layer_norm{n}.{{rest}}", f"{ours}.norm{n}.{{rest}}") for n in (1, 2)),
        *(Rule(f"{layer}.self_attn.{n}_proj.{{rest}}", f"{ours}.qkv.{n}_proj.{{rest}}") for n in "qkv"),
        Rule(f"{layer}.self_attn.out_proj.{{rest}}", f"{ours}.out_proj.{{rest}}"),
        Rule(f"{layer}.mlp.{{rest}}", f"{ours}.mlp.{{rest}}"),
        Rule(f"{VISION}.post_layernorm.{{rest}}", "vision.post_norm.{rest}"),
        Rule(f"{VISION}.head.layernorm.{{rest}}", "vision.head.norm.{rest}"),
        Rule(f"{VISION}.head.{{rest}}", "vision.head.{rest}"),
        Rule(f"{MODEL}.mlp1.0.{{rest}}", "projector.norm.{rest}"),
        Rule(f"{MODEL}.mlp1.1.{{rest}}", "projector.fc1.{rest}"),
        Rule(f"{MODEL}.mlp1.3.{{rest}}", "projector.fc2.{rest}"),
        *language_rules(f"{MODEL}.language_model.model"),
    ]


LAYOUTS = layouts(_rules(), lm_head=f"{MODEL}.language_model.lm_head.weight")
