"""What GR00T N1.6 and N1.7 share beyond the head: batch, loss, sampling, what is trained.

Not a family: `groot_n1_6` and `groot_n1_7` extend `GrootPolicy` with a backbone each.
Facts: NVIDIA/Isaac-GR00T ``gr00t_n1d6.py``, ``gr00t_n1d7.py``; LeRobot 0.6.1 ``groot_n1_7.py``.

Axes: B samples, L text tokens, H action steps, A action and S state width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor, nn

from vlaforge.data.schema import Batch, Contract, Draw, DrawSpec, Field, Trim
from vlaforge.models.action.dit import Context
from vlaforge.models.action.flow import FlowMix, MaskedSquares
from vlaforge.models.action.groot import GrootHead
from vlaforge.models.base import BlockGroup, EmbodiedModel, Losses, LossTerm
from vlaforge.models.blocks.image import NormalizeImages, PrepareImages
from vlaforge.models.groot.config import GrootConfig
from vlaforge.models.towers.qwen3 import Qwen3
from vlaforge.models.towers.qwen3_vision import PatchGrid


@dataclass(frozen=True)
class Overlap:
    """Real-time chunking: the first `steps` actions follow the previous chunk, the first `frozen` of them exactly.

    `previous_BHA` is the previous chunk's tail, aligned with the new chunk's start; between frozen and free the
    velocity is scaled by 1 - exp(-ramp·u) (normalised), u the interior points of a line from 0 to 1.
    """

    previous_BHA: Tensor
    steps: int
    frozen: int
    ramp: float = 6.0

    def strength(self, like_BHA: Tensor) -> Tensor:
        """How much of the velocity each step takes: [H, 1]."""
        between = self.steps - self.frozen
        line = torch.linspace(0.0, 1.0, between + 2, device=like_BHA.device)
        ramp = 1 - torch.exp(-self.ramp * line)
        ramp = (ramp / ramp[-1].clamp_min(1e-8))[1:-1]
        free = torch.ones(like_BHA.shape[1] - self.steps, device=like_BHA.device)
        return torch.cat([torch.zeros(self.frozen, device=like_BHA.device), ramp, free])[:, None]


def patches_of(batch: Batch, vision: nn.Module, prepare: nn.Module) -> tuple[Tensor, PatchGrid, bool]:
    """(patches [B·V, N, values] in merge order, their grid, whether some are padding) from `images` or `patches`.

    `images` are uint8 and normalised here with mean and deviation 1/2: the bytes travel, not the floats.
    """
    merge = vision.config.merge
    if "patches" in batch:
        patches_BVNP = batch["patches"]
        grid = PatchGrid.of(batch["grids"].flatten(0, 1), patches_BVNP.shape[2], merge)
        return patches_BVNP.flatten(0, 1), grid, True
    images_MCHW = prepare(batch["images"], vision.patch_embed.weight.dtype)
    patches_MNP = vision.patchify(images_MCHW)
    sides = (size // vision.config.patch for size in images_MCHW.shape[2:])
    sizes_M2 = torch.stack([torch.full(images_MCHW.shape[:1], side, device=images_MCHW.device) for side in sides], 1)
    return patches_MNP, PatchGrid.of(sizes_M2, patches_MNP.shape[1], merge), False


def image_tokens(config: GrootConfig) -> int:
    """Image tokens of a sample with all its views, at the config's image size."""
    token = config.vision.patch * config.vision.merge
    return config.num_views * math.prod(size // token for size in config.frame)


@dataclass(frozen=True)
class Embedded:
    """What a backbone's language model starts from.

    `image_tokens` is the number of image tokens of every sample where it is known beforehand, else None.
    `deepstack[i]` is added behind layer i.
    """

    x_BLC: Tensor
    image_BL: Tensor
    image_tokens: int | None
    deepstack: list[Tensor] = field(default_factory=list)


class GrootPolicy(EmbodiedModel):
    """Batch: images, tokens, token_mask, state, embodiment, actions, action_mask (and the backbone's own fields)."""

    config: GrootConfig
    positions_axes: ClassVar[int | None] = None
    """The axis of field `positions` that runs along the tokens (batch axis is 0); None: the backbone takes none."""

    def __init__(self, config: GrootConfig):
        super().__init__(config)
        self.salts: Iterator[int] = count()
        height, width = config.frame
        half = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
        self.prepare = PrepareImages(height) if height == width else NormalizeImages((height, width), **half)
        self.head = GrootHead(config.head(), self.salts)
        self.mix = FlowMix(towards="data")
        self.errors = MaskedSquares()

    language: Qwen3

    @abstractmethod
    def embed(self, batch: Batch) -> Embedded:
        """Vision tower and token embedding: what the language model starts from."""

    def positions(self, batch: Batch) -> Tensor:
        """Rotary positions of the tokens: the columns of the padded text, unless the batch brings its own."""
        if "positions" in batch:
            return batch["positions"]
        b, length = batch["token_mask"].shape
        return torch.arange(length, device=batch["token_mask"].device).expand(b, -1)

    def finish(self, hidden_BLC: Tensor) -> Tensor:
        """The last kept layer's output → features."""
        return hidden_BLC

    @property
    def frozen_layers(self) -> int:
        """How many of the language model's layers, with all before them, are never trained."""
        config = self.config
        if config.tune_visual or config.tune_llm:
            return 0
        return config.select_layer - config.tune_top_llm_layers

    def encode_frozen(self, batch: Batch) -> Batch:
        """Runs the frozen layers: `hidden` [B, L, C] and `image_positions` [B, L] take the place of the images.

        Views of several sizes (`patches`) are left to `loss`, which needs their number.
        """
        if "hidden" in batch or "patches" in batch or not self.frozen_layers:
            return batch
        with torch.no_grad():
            start = self.embed(batch)
            hidden_BLC = self.language(
                start.x_BLC, self.positions(batch), batch["token_mask"], start.deepstack, last=self.frozen_layers
            )
        rest = {name: value for name, value in batch.items() if name not in ("images", "tokens")}
        return Batch(rest, hidden=hidden_BLC, image_positions=start.image_BL)

    def features(self, batch: Batch) -> tuple[Tensor, Tensor, int | None]:
        """(features [B, L, C], image positions bool [B, L], image tokens a sample when that number is static)."""
        batch = self.encode_frozen(batch)
        if "hidden" in batch:
            start, first = Embedded(batch["hidden"], batch["image_positions"], self.image_tokens), self.frozen_layers
        else:
            start, first = self.embed(batch), 0
        hidden_BLC = self.language(
            start.x_BLC, self.positions(batch), batch["token_mask"], start.deepstack, first=first
        )
        return self.finish(hidden_BLC), start.image_BL, start.image_tokens

    @property
    def image_tokens(self) -> int:
        return image_tokens(self.config)

    @abstractmethod
    def backbone_blocks(self) -> list[BlockGroup]:
        """The backbone's repeated blocks."""

    @classmethod
    def backbone_fields(cls, config: GrootConfig) -> dict[str, Field]:
        """Fields that only this backbone needs."""
        return {}

    @classmethod
    @abstractmethod
    def vocabulary(cls, config: GrootConfig) -> int:
        """The number of token ids."""

    @classmethod
    def contract(cls, config: GrootConfig) -> Contract:
        horizon, width = config.action_horizon, config.max_action_dim
        fields = {
            "images": Field((config.num_views, *config.frame, 3), torch.uint8, "VHWC", 0, 256),
            "tokens": Field(
                (config.max_token_len,),
                torch.int64,
                "L",
                0,
                cls.vocabulary(config),
                tail=(config.image_token, image_tokens(config)),
            ),
            "token_mask": Field((config.max_token_len,), torch.bool, "L"),
            **cls.backbone_fields(config),
            "state": Field((config.state_width,), torch.float32, "S", -1.0, 1.0),
            "embodiment": Field((), torch.int64, "", 0, config.max_num_embodiments),
            "actions": Field((horizon, width), torch.float32, "HA", -1.0, 1.0, observation=False),
            "action_mask": Field((horizon, width), torch.bool, "HA", observation=False),
        }
        s = config.noise_s
        draws = {
            "noise": DrawSpec((horizon, width), "normal"),
            # t = (1 - Beta(a, b)) · s
            "time": DrawSpec((), "beta", config.noise_beta_alpha, config.noise_beta_beta, scale=-s, offset=s),
        }
        context_drop = config.vl_self_attention.dropout if config.vl_self_attention else 0.0
        if config.dit.dropout or context_drop or config.state_dropout_prob:
            draws["dropout"] = DrawSpec((), "seed")
        cut = [("tokens", 1), ("token_mask", 1)]
        if cls.positions_axes is not None:
            cut.append(("positions", cls.positions_axes))
        # Left padding: the columns that no sample uses are in front.
        return Contract(fields, draws, (Trim("token_mask", tuple(cut), keep="suffix"),))

    def bucket(self, time_B: Tensor) -> Tensor:
        """The integer time bucket, as floats: floor(t · buckets)."""
        return (time_B.float() * self.config.num_timestep_buckets).floor()

    def read(self, batch: Batch, seed_B: Tensor | None = None) -> Context:
        features_BLC, image_BL, image_tokens = self.features(batch)
        return self.head.read_context(features_BLC, batch["token_mask"], image_BL, image_tokens, seed_B)

    def loss(self, batch: Batch, draw: Draw) -> Losses:
        """x = (1 - t)·noise + t·action; target action - noise; masked mean of squares."""
        seed_B = draw.get("dropout") if self.training else None
        mask_BHA, embodiment_B = batch["action_mask"], batch["embodiment"]
        noisy_BHA, target_BHA = self.mix(draw["noise"], batch["actions"], mask_BHA, draw["time"])
        context = self.read(batch, seed_B)
        state_B1D = self.head.encode_state(batch["state"], embodiment_B, seed_B)
        keys_values = self.head.dit.keys_values(context)
        bucket_B = self.bucket(draw["time"])
        velocity_BHA = self.head.velocity(noisy_BHA, bucket_B, state_B1D, embodiment_B, keys_values, context, seed_B)
        term = LossTerm(*self.errors(velocity_BHA, target_BHA, mask_BHA))
        return Losses({"action_loss": term}, {"target": target_BHA, "velocity": velocity_BHA.detach().float()})

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"action_loss": batch["action_mask"].sum().float()}

    @torch.no_grad()
    def act(self, obs: Batch, draw: Draw, steps: int, overlap: Overlap | None = None) -> Tensor:
        """Euler from t = 0 (noise) to 1, `steps` equal steps; the context is encoded once."""
        embodiment_B = obs["embodiment"]
        context = self.read(obs)
        keys_values = self.head.dit.keys_values(context, ahead=True)
        state_B1D = self.head.encode_state(obs["state"], embodiment_B)
        x_BHA, strength = draw["noise"].clone(), None
        if overlap is not None:
            x_BHA[:, : overlap.steps] = overlap.previous_BHA[:, : overlap.steps]
            strength = overlap.strength(x_BHA)
        for step in range(steps):
            bucket = math.floor(step / steps * self.config.num_timestep_buckets)
            bucket_B = torch.full((x_BHA.shape[0],), float(bucket), device=x_BHA.device)
            velocity = self.head.velocity(x_BHA, bucket_B, state_B1D, embodiment_B, keys_values, context).float()
            x_BHA = x_BHA + velocity / steps * (1.0 if strength is None else strength)
        return x_BHA

    def token_count(self, batch: Batch) -> int:
        """Positions of the language model, and of the head: the state and the actions."""
        samples, length = batch["token_mask"].shape
        return samples * (length + 1 + self.config.action_horizon)

    def blocks(self) -> list[BlockGroup]:
        depth = len(self.head.context_blocks)
        groups = self.backbone_blocks()
        if depth:
            groups.append(BlockGroup("head.context_blocks", tuple(f"head.context_blocks.{i}" for i in range(depth))))
        # Cross- and self-attention blocks have other weight shapes: two kinds, two groups.
        for kind, first in (("cross", 0), ("self", 1)):
            names = tuple(f"head.dit.blocks.{i}" for i in range(first, self.config.dit.layers, 2))
            groups.append(BlockGroup(f"head.dit.blocks[{kind}]", names))
        return groups

    def freeze(self) -> None:
        """Turns gradients off for what the config's `tune_*` switches leave untrained; families call it when built."""
        for path in self.frozen():
            part = self.get_parameter(path) if path == "head.positions" else self.get_submodule(path)
            part.requires_grad_(False)

    def frozen(self) -> list[str]:
        """Paths that the config's `tune_*` switches leave untrained."""
        config, depth = self.config, self.config.select_layer
        paths = []
        if not config.tune_visual:
            paths += self.towers()["vision"]
        if not config.tune_llm:
            tuned = range(depth - config.tune_top_llm_layers, depth)
            paths += ["language.tokens", "language.norm"]
            paths += [f"language.layers.{i}" for i in range(depth) if i not in tuned]
        if not config.tune_projector:
            paths += ["head.state_encoder", "head.action_encoder", "head.action_decoder"]
            paths += ["head.positions"] if config.add_pos_embed else []
        if not config.tune_diffusion_model:
            paths.append("head.dit")
        if not config.tune_vlln:
            paths += ["head.norm_context", "head.context_blocks"]
        return paths
