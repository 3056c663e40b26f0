"""GR00T N1.7's public checkpoint layouts: NVIDIA's, and LeRobot's, which puts ``_groot_model.`` in front."""

from __future__ import annotations

from torch import Tensor

from vlaforge.models.convert import Rule
from vlaforge.models.groot.convert import language_rules, layouts

VISION = "backbone.model.model.visual"


def _flat(x: Tensor) -> Tensor:
    """[D, 3, frames, P, P] → [D, values]: the published patch convolution is a linear layer on flat patches."""
    return x.flatten(1)


def _rules(frames: int = 2) -> list[Rule]:
    block, merger = f"{VISION}.blocks.{{i}}", f"{VISION}.deepstack_merger_list.{{i}}"

    def unflat(x: Tensor) -> Tensor:
        side = round((x.shape[1] / 3 / frames) ** 0.5)
        return x.unflatten(1, (3, frames, side, side))

    return [
        Rule(f"{VISION}.patch_embed.proj.weight", "vision.patch_embed.weight", load=_flat, save=unflat),
        Rule(f"{VISION}.patch_embed.proj.bias", "vision.patch_embed.bias"),
        Rule(f"{VISION}.pos_embed.weight", "vision.positions.weight"),
        *(Rule(f"{block}.attn.{n}.{{rest}}", f"vision.blocks.{{i}}.{n}.{{rest}}") for n in ("qkv", "proj")),
        *(Rule(f"{block}.mlp.linear_{n}.{{rest}}", f"vision.blocks.{{i}}.mlp.{n}.{{rest}}") for n in ("fc1", "fc2")),
        *(Rule(f"{block}.{n}.{{rest}}", f"vision.blocks.{{i}}.{n}.{{rest}}") for n in ("norm1", "norm2")),
        *(
            Rule(f"{merger}.linear_{n}.{{rest}}", f"vision.deepstack_mergers.{{i}}.{n}.{{rest}}")
            for n in ("fc1", "fc2")
        ),
        Rule(f"{merger}.norm.{{rest}}", "vision.deepstack_mergers.{i}.norm.{rest}"),
        *(Rule(f"{VISION}.merger.linear_{n}.{{rest}}", f"vision.merger.{n}.{{rest}}") for n in ("fc1", "fc2")),
        Rule(f"{VISION}.merger.norm.{{rest}}", "vision.merger.norm.{rest}"),
        *language_rules("backbone.model.model.language_model"),
    ]


LAYOUTS = layouts(_rules(), lm_head="backbone.model.lm_head.weight")
