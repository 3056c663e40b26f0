"""Public names of Wan's parts, both ways: original ↔ diffusers (DiT, VAE 2.2) and original ↔ transformers (UMT5).

A pattern holds ``{i}``, ``{j}`` for numbers and ``{rest}`` for the remaining path. A name that no pattern knows is an
error: silence there is how weights get lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from vlaforge.data.errors import UserError


class Names:
    """A reversible renaming of state-dict keys.

    Args:
        title: what is renamed, for messages.
        pairs: (left, right) patterns; the first that fits counts.
    """

    def __init__(self, title: str, pairs: tuple[tuple[str, str], ...]):
        self.title, self.pairs = title, pairs

    @cached_property
    def _forward(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(left), right) for left, right in self.pairs]

    @cached_property
    def _backward(self) -> list[tuple[re.Pattern[str], str]]:
        return [(_pattern(right), left) for left, right in self.pairs]

    def right(self, name: str) -> str | None:
        """The right-hand name of a left-hand one; None when no pattern fits."""
        return _apply(self._forward, name)

    def left(self, name: str) -> str | None:
        """The left-hand name of a right-hand one; None when no pattern fits."""
        return _apply(self._backward, name)

    def to_right(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All keys renamed; UserError listing those that are unknown."""
        return self._all(state, self.right)

    def to_left(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All keys renamed; UserError listing those that are unknown."""
        return self._all(state, self.left)

    def fits_left(self, state: Mapping[str, Tensor]) -> bool:
        """Whether every key has a left-hand pattern: how a file's layout is recognised."""
        return all(self.right(name) is not None for name in state)

    def _all(self, state: Mapping[str, Tensor], rename) -> dict[str, Tensor]:
        named = {name: rename(name) for name in state}
        if strange := sorted(name for name, new in named.items() if new is None):
            shown = ", ".join(strange[:5]) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
            raise UserError(f"The {self.title} weights hold keys that are not known: {shown}.")
        return {named[name]: value for name, value in state.items()}


def _apply(table: list[tuple[re.Pattern[str], str]], name: str) -> str | None:
    for pattern, template in table:
        if match := pattern.fullmatch(name):
            return template.format(**match.groupdict())
    return None


def _pattern(text: str) -> re.Pattern[str]:
    escaped = re.escape(text).replace(r"\{rest\}", "(?P<rest>.+)")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", escaped))


WAN_DIT = Names(
    "Wan DiT",
    (
        *(
            (f"blocks.{{i}}.{ours}.{{rest}}", f"blocks.{{i}}.{theirs}.{{rest}}")
            for attn, attn_theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
            for ours, theirs in (
                *((f"{attn}.{part}", f"{attn_theirs}.to_{part}") for part in "qkv"),
                (f"{attn}.o", f"{attn_theirs}.to_out.0"),
                *((f"{attn}.{norm}", f"{attn_theirs}.{norm}") for norm in ("norm_q", "norm_k")),
                *((f"{attn}.{part}_img", f"{attn_theirs}.add_{part}_proj") for part in "kv"),
                (f"{attn}.norm_k_img", f"{attn_theirs}.norm_added_k"),
            )
        ),
        # The affine norm before cross attention is the third of the original and the second of diffusers.
        ("blocks.{i}.norm3.{rest}", "blocks.{i}.norm2.{rest}"),
        ("blocks.{i}.ffn.0.{rest}", "blocks.{i}.ffn.net.0.proj.{rest}"),
        ("blocks.{i}.ffn.2.{rest}", "blocks.{i}.ffn.net.2.{rest}"),
        ("blocks.{i}.modulation", "blocks.{i}.scale_shift_table"),
        ("patch_embedding.{rest}", "patch_embedding.{rest}"),
        ("time_embedding.0.{rest}", "condition_embedder.time_embedder.linear_1.{rest}"),
        ("time_embedding.2.{rest}", "condition_embedder.time_embedder.linear_2.{rest}"),
        ("time_projection.1.{rest}", "condition_embedder.time_proj.{rest}"),
        ("text_embedding.0.{rest}", "condition_embedder.text_embedder.linear_1.{rest}"),
        ("text_embedding.2.{rest}", "condition_embedder.text_embedder.linear_2.{rest}"),
        ("img_emb.proj.0.{rest}", "condition_embedder.image_embedder.norm1.{rest}"),
        ("img_emb.proj.1.{rest}", "condition_embedder.image_embedder.ff.net.0.proj.{rest}"),
        ("img_emb.proj.3.{rest}", "condition_embedder.image_embedder.ff.net.2.{rest}"),
        ("img_emb.proj.4.{rest}", "condition_embedder.image_embedder.norm2.{rest}"),
        ("head.head.{rest}", "proj_out.{rest}"),
        ("head.modulation", "scale_shift_table"),
    ),
)
"""Wan's DiT: left original (FastWAM, DreamZero), right diffusers (LingBot-VA, ``WanTransformer3DModel``)."""


UMT5 = Names(
    "UMT5 encoder",
    (
        ("token_embedding.weight", "shared.weight"),
        *((f"blocks.{{i}}.attn.{p}.weight", f"encoder.block.{{i}}.layer.0.SelfAttention.{p}.weight") for p in "qkvo"),
        (
            "blocks.{i}.pos_embedding.embedding.weight",
            "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        ("blocks.{i}.norm1.weight", "encoder.block.{i}.layer.0.layer_norm.weight"),
        ("blocks.{i}.norm2.weight", "encoder.block.{i}.layer.1.layer_norm.weight"),
        ("blocks.{i}.ffn.gate.0.weight", "encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight"),
        ("blocks.{i}.ffn.fc1.weight", "encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight"),
        ("blocks.{i}.ffn.fc2.weight", "encoder.block.{i}.layer.1.DenseReluDense.wo.weight"),
        ("norm.weight", "encoder.final_layer_norm.weight"),
    ),
)
"""Wan's T5: left the official ``models_t5_umt5-xxl-enc-bf16.pth``, right transformers' ``UMT5EncoderModel``."""


def vae22_names(blocks: int = 2) -> Names:
    """Wan's VAE 2.2: left the official ``Wan2.2_VAE.pth``, right diffusers' ``AutoencoderKLWan``.

    `blocks` is the number of residual blocks a level of the encoder has (the decoder has one more); the resampler
    follows them in the original's lists.
    """
    inside = (("0", "norm1"), ("2", "conv1"), ("3", "norm2"), ("6", "conv2"))
    pairs = [
        ("conv1.{rest}", "quant_conv.{rest}"),
        ("conv2.{rest}", "post_quant_conv.{rest}"),
    ]
    for side, level, count in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
        old, new = f"{side}.{level}samples.{{i}}.{level}samples", f"{side}.{level}_blocks.{{i}}"
        pairs += [(f"{old}.{{j}}.residual.{a}.{{rest}}", f"{new}.resnets.{{j}}.{b}.{{rest}}") for a, b in inside]
        pairs += [
            (f"{old}.{{j}}.shortcut.{{rest}}", f"{new}.resnets.{{j}}.conv_shortcut.{{rest}}"),
            (f"{old}.{count}.{{rest}}", f"{new}.{level}sampler.{{rest}}"),
            (f"{side}.conv1.{{rest}}", f"{side}.conv_in.{{rest}}"),
            (f"{side}.middle.1.{{rest}}", f"{side}.mid_block.attentions.0.{{rest}}"),
            (f"{side}.head.0.{{rest}}", f"{side}.norm_out.{{rest}}"),
            (f"{side}.head.2.{{rest}}", f"{side}.conv_out.{{rest}}"),
        ]
        for position, index in (("0", "0"), ("2", "1")):
            pairs += [
                (f"{side}.middle.{position}.residual.{a}.{{rest}}", f"{side}.mid_block.resnets.{index}.{b}.{{rest}}")
                for a, b in inside
            ]
    return Names("Wan VAE 2.2", tuple(pairs))
