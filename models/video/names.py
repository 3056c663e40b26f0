"""Public names of Wan's parts as two-way rules: original ↔ diffusers (DiT, VAE 2.2), original ↔ transformers (UMT5)."""

from __future__ import annotations

from collections.abc import Iterable

from vlaforge.models.convert import Layout, Rule


def _attention(ours: str, theirs: str) -> Iterable[Rule]:
    """One attention of a Wan block, with the image keys that DreamZero's models have."""
    pairs = [
        *((part, f"to_{part}") for part in "qkv"),
        ("o", "to_out.0"),
        ("norm_q", "norm_q"),
        ("norm_k", "norm_k"),
        *((f"{part}_img", f"add_{part}_proj") for part in "kv"),
        ("norm_k_img", "norm_added_k"),
    ]
    return [Rule(f"blocks.{{i}}.{ours}.{a}.{{rest}}", f"blocks.{{i}}.{theirs}.{b}.{{rest}}") for a, b in pairs]


WAN_DIT = (
    *_attention("self_attn", "attn1"),
    *_attention("cross_attn", "attn2"),
    # The affine norm before cross attention is the third of the original and the second of diffusers.
    Rule("blocks.{i}.norm3.{rest}", "blocks.{i}.norm2.{rest}"),
    Rule("blocks.{i}.ffn.0.{rest}", "blocks.{i}.ffn.net.0.proj.{rest}"),
    Rule("blocks.{i}.ffn.2.{rest}", "blocks.{i}.ffn.net.2.{rest}"),
    Rule("blocks.{i}.modulation", "blocks.{i}.scale_shift_table"),
    Rule("patch_embedding.{rest}", "patch_embedding.{rest}"),
    Rule("time_embedding.0.{rest}", "condition_embedder.time_embedder.linear_1.{rest}"),
    Rule("time_embedding.2.{rest}", "condition_embedder.time_embedder.linear_2.{rest}"),
    Rule("time_projection.1.{rest}", "condition_embedder.time_proj.{rest}"),
    Rule("text_embedding.0.{rest}", "condition_embedder.text_embedder.linear_1.{rest}"),
    Rule("text_embedding.2.{rest}", "condition_embedder.text_embedder.linear_2.{rest}"),
    Rule("img_emb.proj.0.{rest}", "condition_embedder.image_embedder.norm1.{rest}"),
    Rule("img_emb.proj.1.{rest}", "condition_embedder.image_embedder.ff.net.0.proj.{rest}"),
    Rule("img_emb.proj.3.{rest}", "condition_embedder.image_embedder.ff.net.2.{rest}"),
    Rule("img_emb.proj.4.{rest}", "condition_embedder.image_embedder.norm2.{rest}"),
    Rule("head.head.{rest}", "proj_out.{rest}"),
    Rule("head.modulation", "scale_shift_table"),
)
"""Wan's DiT: original (FastWAM, DreamZero) ↔ diffusers (LingBot-VA, ``WanTransformer3DModel``)."""


def block_rules(official: str, ours: str) -> tuple[Rule, ...]:
    """One block in original names ↔ a `WanBlock`, whose self attention keeps q, k and v together."""
    together = (Rule(f"{official}.self_attn.{p}.{{rest}}", f"{ours}.self_attn.qkv.{p}_proj.{{rest}}") for p in "qkv")
    return (*together, Rule(f"{official}.{{rest}}", f"{ours}.{{rest}}"))


def expert_rules(official: str, expert: str) -> tuple[Rule, ...]:
    """An expert of a world-action model in original names ↔ ours, where its blocks are halves of shared layers.

    `official` stands before the original names; `expert` is our module of what stands around the blocks, and the half's
    name in ``layers``.
    """
    return (
        *block_rules(f"{official}blocks.{{i}}", f"layers.{{i}}.{expert}"),
        Rule(f"{official}time_embedding.{{rest}}", f"{expert}.time.embedding.{{rest}}"),
        Rule(f"{official}time_projection.{{rest}}", f"{expert}.time.projection.{{rest}}"),
        *(
            Rule(f"{official}{part}.{{rest}}", f"{expert}.{part}.{{rest}}")
            for part in ("patch_embedding", "text_embedding", "head", "action_encoder")
        ),
    )


_SAME = Layout("library", (Rule("{rest}", "{rest}"),))

UMT5_LAYOUTS = {
    "official": Layout(
        "official",
        (
            Rule("token_embedding.weight", "shared.weight"),
            *(
                Rule(f"blocks.{{i}}.attn.{p}.weight", f"encoder.block.{{i}}.layer.0.SelfAttention.{p}.weight")
                for p in "qkvo"
            ),
            Rule(
                "blocks.{i}.pos_embedding.embedding.weight",
                "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight",
            ),
            Rule("blocks.{i}.norm1.weight", "encoder.block.{i}.layer.0.layer_norm.weight"),
            Rule("blocks.{i}.norm2.weight", "encoder.block.{i}.layer.1.layer_norm.weight"),
            Rule("blocks.{i}.ffn.gate.0.weight", "encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight"),
            Rule("blocks.{i}.ffn.fc1.weight", "encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight"),
            Rule("blocks.{i}.ffn.fc2.weight", "encoder.block.{i}.layer.1.DenseReluDense.wo.weight"),
            Rule("norm.weight", "encoder.final_layer_norm.weight"),
        ),
    ),
    "library": Layout(
        "library", _SAME.rules, skips={"encoder.embed_tokens.weight": "the same tensor as shared.weight"}
    ),
}
"""Wan's T5: ``models_t5_umt5-xxl-enc-bf16.pth`` and transformers' ``UMT5EncoderModel``, whose names are ours."""


def vae22_layouts(blocks: int = 2) -> dict[str, Layout]:
    """Wan's VAE 2.2: ``Wan2.2_VAE.pth`` and diffusers' ``AutoencoderKLWan``, whose names are ours.

    `blocks` is the number of residual blocks a level of the encoder has (the decoder has one more); the resampler
    follows them in the original's lists.
    """
    inside = (("0", "norm1"), ("2", "conv1"), ("3", "norm2"), ("6", "conv2"))
    rules = [Rule("conv1.{rest}", "quant_conv.{rest}"), Rule("conv2.{rest}", "post_quant_conv.{rest}")]
    for side, level, count in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
        old, new = f"{side}.{level}samples.{{i}}.{level}samples", f"{side}.{level}_blocks.{{i}}"
        rules += [Rule(f"{old}.{{j}}.residual.{a}.{{rest}}", f"{new}.resnets.{{j}}.{b}.{{rest}}") for a, b in inside]
        rules += [
            Rule(f"{old}.{{j}}.shortcut.{{rest}}", f"{new}.resnets.{{j}}.conv_shortcut.{{rest}}"),
            Rule(f"{old}.{count}.{{rest}}", f"{new}.{level}sampler.{{rest}}"),
            Rule(f"{side}.conv1.{{rest}}", f"{side}.conv_in.{{rest}}"),
            Rule(f"{side}.middle.1.{{rest}}", f"{side}.mid_block.attentions.0.{{rest}}"),
            Rule(f"{side}.head.0.{{rest}}", f"{side}.norm_out.{{rest}}"),
            Rule(f"{side}.head.2.{{rest}}", f"{side}.conv_out.{{rest}}"),
        ]
        for position, index in (("0", "0"), ("2", "1")):
            rules += [
                Rule(
                    f"{side}.middle.{position}.residual.{a}.{{rest}}", f"{side}.mid_block.resnets.{index}.{b}.{{rest}}"
                )
                for a, b in inside
            ]
    return {"official": Layout("official", tuple(rules)), "library": _SAME}
