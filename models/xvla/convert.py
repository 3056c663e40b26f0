"""X-VLA's public layouts: the original one (2toINF/X-VLA, Microsoft's Florence-2 names) and LeRobot's, which
since 0.6 has transformers' names behind ``model.``; older LeRobot files are the original with that prefix."""

from __future__ import annotations

from torch import Tensor

from vlaforge.models.convert import Layout, Rule

HALVES = (("spatial", "window_attn"), ("channel", "channel_attn"))


def _transposed(x: Tensor) -> Tensor:
    return x.T.contiguous()


def _flat(x: Tensor) -> Tensor:
    """[E, I, O] → [E, I·O]: the published layers keep their weights in embedding tables."""
    return x.flatten(1)


def _batched(x: Tensor) -> Tensor:
    return x[None]


def _policy() -> list[Rule]:
    block, ours = "transformer.blocks.{i}", "policy.blocks.{i}"
    rules = [
        Rule("transformer.pos_emb", "policy.positions", save=_batched, reshape=True),
        Rule("transformer.soft_prompt_hub.weight", "policy.soft_prompts", save=_flat, reshape=True),
        Rule("transformer.norm.{rest}", "policy.norm.{rest}"),
        *(Rule(f"{block}.attn.{n}.{{rest}}", f"{ours}.{n}.{{rest}}") for n in ("qkv", "proj")),
        *(Rule(f"{block}.mlp.{n}.{{rest}}", f"{ours}.{n}.{{rest}}") for n in ("fc1", "fc2")),
        *(Rule(f"{block}.{n}.{{rest}}", f"{ours}.{n}.{{rest}}") for n in ("norm1", "norm2")),
    ]
    for name in ("action_encoder", "action_decoder", "vlm_proj", "aux_visual_proj"):
        # By domain (always for the actions, with use_hetero_proj for the others): a table of weights and one of biases.
        rules += [
            Rule(f"transformer.{name}.fc.weight", f"policy.{name}.table", save=_flat, reshape=True),
            Rule(f"transformer.{name}.bias.weight", f"policy.{name}.offset"),
        ]
    rules += [
        Rule(f"transformer.{name}.{part}", f"policy.{name}.{part}")
        for name in ("vlm_proj", "aux_visual_proj")
        for part in ("weight", "bias")
    ]
    return rules


def _vision(native: bool) -> list[Rule]:
    tower = "vlm.vision_tower"
    conv = "conv" if native else "proj"
    rules = [
        Rule(f"{tower}.convs.{{i}}.{conv}.{{rest}}", "vision.stages.{i}.embed.conv.{rest}"),
        Rule(f"{tower}.convs.{{i}}.norm.{{rest}}", "vision.stages.{i}.embed.norm.{rest}"),
    ]
    for half, attn in HALVES:
        theirs, ours = f"{tower}.blocks.{{i}}.{{j}}.{half}_block", f"vision.stages.{{i}}.blocks.{{j}}.{half}"
        names = (
            (("conv1", "conv1"), ("norm1", "norm1"), (attn, "attn"), ("conv2", "conv2"), ("norm2", "norm2"))
            if native
            else (
                ("conv1.fn.dw", "conv1"),
                (f"{attn}.norm", "norm1"),
                (f"{attn}.fn", "attn"),
                ("conv2.fn.dw", "conv2"),
                ("ffn.norm", "norm2"),
            )
        )
        rules += [Rule(f"{theirs}.{a}.{{rest}}", f"{ours}.{b}.{{rest}}") for a, b in names]
        mlp = "ffn" if native else "ffn.fn.net"
        rules += [Rule(f"{theirs}.{mlp}.{n}.{{rest}}", f"{ours}.{n}.{{rest}}") for n in ("fc1", "fc2")]
    return rules


def _projector(native: bool) -> list[Rule]:
    home = "vlm.multi_modal_projector" if native else "vlm"
    table = "image_position_embed" if native else "image_pos_embed"
    projection = (
        Rule(f"{home}.image_projection.weight", "projector.projection.weight")
        if native
        else Rule("vlm.image_projection", "projector.projection.weight", load=_transposed, save=_transposed)
    )
    return [
        projection,
        Rule(f"{home}.{table}.row_embeddings.weight", "projector.rows.weight"),
        Rule(f"{home}.{table}.column_embeddings.weight", "projector.columns.weight"),
        Rule(f"{home}.visual_temporal_embed.pos_idx_to_embed", "projector.temporal"),
        Rule(f"{home}.image_proj_norm.{{rest}}", "projector.norm.{rest}"),
    ]


def _language(home: str) -> list[Rule]:
    layer, ours = f"{home}.encoder.layers.{{i}}", "language.layers.{i}"
    return [
        Rule(f"{home}.shared.weight", "language.tokens.weight"),
        Rule(f"{home}.encoder.embed_positions.weight", "language.positions.weight"),
        Rule(f"{home}.encoder.layernorm_embedding.{{rest}}", "language.norm.{rest}"),
        *(Rule(f"{layer}.self_attn.{n}_proj.{{rest}}", f"{ours}.qkv.{n}_proj.{{rest}}") for n in "qkv"),
        Rule(f"{layer}.self_attn.out_proj.{{rest}}", f"{ours}.out_proj.{{rest}}"),
        Rule(f"{layer}.self_attn_layer_norm.{{rest}}", f"{ours}.norm1.{{rest}}"),
        Rule(f"{layer}.final_layer_norm.{{rest}}", f"{ours}.norm2.{{rest}}"),
        *(Rule(f"{layer}.{n}.{{rest}}", f"{ours}.{n}.{{rest}}") for n in ("fc1", "fc2")),
    ]


def _layout(name: str, prefix: str, native: bool) -> Layout:
    text = "vlm.language_model" if native else "vlm.language_model.model"
    return Layout(
        name=name,
        rules=tuple(_policy() + _vision(native) + _projector(native) + _language(text)),
        prefix=prefix,
        ties={"language.tokens.weight": (f"{text}.encoder.embed_tokens.weight",)},
        ties_written="own",
        skips={"vlm.language_model.final_logits_bias": "X-VLA generates no text"},
    )


LAYOUTS = {
    "original": _layout("original", "", native=False),
    "lerobot": _layout("lerobot", "model.", native=True),
    "lerobot_original": _layout("lerobot_original", "model.", native=False),
}
