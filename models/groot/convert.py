"""Rules for GR00T's action head and its Qwen3 language model, the same in N1.6's and N1.7's checkpoints.

LeRobot's policies put ``_groot_model.`` in front of NVIDIA's names.
"""

from __future__ import annotations

from vlaforge.models.convert import Layout, Rule


def _attention(theirs: str, ours: str) -> list[Rule]:
    return [
        *(Rule(f"{theirs}.to_{n}.{{rest}}", f"{ours}.{n}_proj.{{rest}}") for n in "qkv"),
        Rule(f"{theirs}.to_out.0.{{rest}}", f"{ours}.o_proj.{{rest}}"),
    ]


def _feed_forward(theirs: str, ours: str) -> list[Rule]:
    return [
        Rule(f"{theirs}.net.0.proj.{{rest}}", f"{ours}.fc1.{{rest}}"),
        Rule(f"{theirs}.net.2.{{rest}}", f"{ours}.fc2.{{rest}}"),
    ]


def head_rules() -> list[Rule]:
    head, context, dit = "action_head", "action_head.vl_self_attention.transformer_blocks.{i}", "action_head.model"
    block = f"{dit}.transformer_blocks.{{i}}"
    rules = [
        Rule(f"{head}.position_embedding.weight", "head.positions"),
        Rule(f"{head}.mask_token", "head.state_token", reshape=True, save=lambda x: x[None, None]),
        Rule(f"{head}.vlln.{{rest}}", "head.norm_context.{rest}"),
        Rule(f"{context}.norm1.{{rest}}", "head.context_blocks.{i}.norm1.{rest}"),
        Rule(f"{context}.norm3.{{rest}}", "head.context_blocks.{i}.norm2.{rest}"),
        *_attention(f"{context}.attn1", "head.context_blocks.{i}.attn"),
        *_feed_forward(f"{context}.ff", "head.context_blocks.{i}.ff"),
        Rule(f"{dit}.timestep_encoder.timestep_embedder.linear_1.{{rest}}", "head.dit.time_fc1.{rest}"),
        Rule(f"{dit}.timestep_encoder.timestep_embedder.linear_2.{{rest}}", "head.dit.time_fc2.{rest}"),
        Rule(f"{dit}.proj_out_1.{{rest}}", "head.dit.modulation_out.{rest}"),
        Rule(f"{dit}.proj_out_2.{{rest}}", "head.dit.proj_out.{rest}"),
        Rule(f"{block}.norm1.linear.{{rest}}", "head.dit.blocks.{i}.modulation.{rest}"),
        *_attention(f"{block}.attn1", "head.dit.blocks.{i}.attn"),
        *_feed_forward(f"{block}.ff", "head.dit.blocks.{i}.ff"),
    ]
    by_embodiment = [
        *((f"{name}.layer{n}", f"{name}.layer{n}") for name in ("state_encoder", "action_decoder") for n in (1, 2)),
        *((f"action_encoder.W{n}", f"action_encoder.w{n}") for n in (1, 2, 3)),
    ]
    for theirs, ours in by_embodiment:
        rules += [
            Rule(f"{head}.{theirs}.W", f"head.{ours}.table"),
            Rule(f"{head}.{theirs}.b", f"head.{ours}.offset"),
        ]
    return rules


def language_rules(home: str) -> list[Rule]:
    """`home` is the language model's path in the official names."""
    layer, ours = f"{home}.layers.{{i}}", "language.layers.{i}"
    return [
        Rule(f"{home}.embed_tokens.weight", "language.tokens.weight"),
        Rule(f"{home}.norm.weight", "language.norm.weight"),
        Rule(f"{layer}.input_layernorm.weight", f"{ours}.input_norm.weight"),
        Rule(f"{layer}.post_attention_layernorm.weight", f"{ours}.post_norm.weight"),
        *(Rule(f"{layer}.self_attn.{n}_proj.weight", f"{ours}.attn.qkv.{n}_proj.weight") for n in "qkv"),
        Rule(f"{layer}.self_attn.{{rest}}", f"{ours}.attn.{{rest}}"),
        Rule(f"{layer}.mlp.{{rest}}", f"{ours}.mlp.{{rest}}"),
    ]


def layouts(backbone: list[Rule], lm_head: str) -> dict[str, Layout]:
    """NVIDIA's layout and LeRobot's, for one backbone; `lm_head` is the official name of the tied output head."""
    return {
        name: Layout(
            name=name,
            rules=tuple(head_rules() + backbone),
            prefix=prefix,
            ties={"language.tokens.weight": (lm_head,)},
            ties_written="own",
            optional={"head.state_token": "only a state that is dropped in training needs it (model.state_mask_token)"},
        )
        for name, prefix in (("nvidia", ""), ("lerobot", "_groot_model."))
    }
