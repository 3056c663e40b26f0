"""X-VLA: Florence-2's encoder, soft prompts a domain, and a transformer that predicts the clean action.

Facts: github.com/2toINF/X-VLA (arXiv 2510.10274) and LeRobot 0.6.1 ``policies/xvla``.

Axes: B samples, V views, L text tokens, T tokens, D width of the policy, H action steps, A action and S state width.
"""

from __future__ import annotations

import math
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.data.schema import Batch, Contract, Draw, DrawSpec, Field, Trim
from vlaforge.models.action.embodiment import ByEmbodiment, EmbodimentLinear
from vlaforge.models.action.flow import FlowMix
from vlaforge.models.base import BlockGroup, EmbodiedModel, Losses
from vlaforge.models.blocks.attention import merge_heads
from vlaforge.models.blocks.dropout import Dropout
from vlaforge.models.blocks.image import NormalizeImages
from vlaforge.models.towers.florence2 import BartEncoder, DaViT, DropoutAttention, Florence2Projector
from vlaforge.models.xvla.config import ModelConfig


class PolicyBlock(nn.Module):
    """Pre-norm block: x + attn(LN x), x + MLP(LN x); full attention, GELU (tanh).

    Args:
        rows: how many of the first tokens are read afterwards; only these come out. None: all.
    """

    def __init__(self, config: ModelConfig, salts: count, rows: int | None = None):
        super().__init__()
        width = config.hidden_size
        self.heads, self.rows = config.num_heads, rows
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = DropoutAttention(Dropout(config.attn_dropout, next(salts)))
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, int(width * config.mlp_ratio))
        self.fc2 = nn.Linear(int(width * config.mlp_ratio), width)
        self.act = nn.GELU(approximate="tanh")
        self.drop1 = Dropout(config.mlp_dropout, next(salts))
        self.drop2 = Dropout(config.mlp_dropout, next(salts))

    def forward(self, x_BTD: Tensor, seed_B: Tensor | None) -> Tensor:
        b, t, d = x_BTD.shape
        q, k, v = self.qkv(self.norm1(x_BTD)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = self.attention(q[:, :, : self.rows], k, v, seed_B)
        x_BTD = x_BTD[:, : self.rows] + self.proj(merge_heads(mixed))
        hidden = self.drop1(self.act(self.fc1(self.norm2(x_BTD))), seed_B)
        return x_BTD + self.drop2(self.fc2(hidden), seed_B)


class Policy(ByEmbodiment):
    """Soft-prompted transformer over [action tokens | text and view 0 | other views | soft prompts]."""

    tables = ("soft_prompts",)

    def __init__(self, config: ModelConfig, salts: count):
        super().__init__()
        width, vlm, domains = config.hidden_size, config.text.width, config.num_domains
        self.dim_time = config.dim_time
        self.hetero = config.use_hetero_proj
        inputs = config.action_width + config.state_width + config.dim_time
        self.action_encoder = EmbodimentLinear(domains, inputs, width)
        self.action_decoder = EmbodimentLinear(domains, width, config.action_width)
        if self.hetero:
            self.vlm_proj = EmbodimentLinear(domains, vlm, width)
            self.aux_visual_proj = EmbodimentLinear(domains, vlm, width)
        else:
            self.vlm_proj = nn.Linear(vlm, width)
            self.aux_visual_proj = nn.Linear(vlm, width)
        self.positions = nn.Parameter(torch.randn(config.max_len_seq, width) * 0.02)
        self.soft_prompts = nn.Parameter(torch.randn(domains, config.len_soft_prompts, width) * 0.02)
        # Only the action tokens, which stand first, are read behind the last block.
        rows = [None] * (config.depth - 1) + [config.action_horizon]
        self.blocks = nn.ModuleList(PolicyBlock(config, salts, read) for read in rows)
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x_BHA: Tensor, state_BS: Tensor, time_B: Tensor, text: Tensor, views: Tensor, domain_B: Tensor, seed_B
    ) -> Tensor:
        """Noisy actions, state, time in [0, 1], encoded text and views [B, T, vlm width] → clean action [B, H, A]."""
        b, h, _ = x_BHA.shape
        weight_dtype = self.action_encoder.table.dtype
        time_BK = time_embedding(time_B, self.dim_time)
        inputs = [x_BHA, state_BS[:, None].expand(b, h, -1), time_BK[:, None].expand(b, h, -1)]
        actions = self.action_encoder(torch.cat([part.to(weight_dtype) for part in inputs], dim=-1), domain_B)
        actions = actions.to(text.dtype)
        if self.hetero:
            text, views = self.vlm_proj(text, domain_B), self.aux_visual_proj(views, domain_B)
        else:
            text, views = self.vlm_proj(text), self.aux_visual_proj(views)
        x_BTD = torch.cat([actions, text, views], dim=1)
        x_BTD = x_BTD + self.positions[: x_BTD.shape[1]]
        x_BTD = torch.cat([x_BTD, self.soft_prompts.index_select(0, self.row(domain_B))], dim=1)
        for block in self.blocks:
            x_BTD = block(x_BTD, seed_B)
        return self.action_decoder(self.norm(x_BTD[:, :h]).to(weight_dtype), domain_B)


def time_embedding(time_B: Tensor, dim: int, max_period: float = 100.0) -> Tensor:
    """fp32 [B, dim]: cos then sin of t * max_period^(-i / half), t in [0, 1]."""
    half = dim // 2
    frequency = torch.exp(-math.log(max_period) / half * torch.arange(half, device=time_B.device, dtype=torch.float32))
    angle = time_B.float()[:, None] * frequency
    return F.pad(torch.cat([angle.cos(), angle.sin()], dim=-1), (0, dim % 2))


class Model(EmbodiedModel):
    """Batch: images, image_mask, tokens, state, embodiment, actions, action_mask; draws: noise, time."""

    family = "xvla"
    config: ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        salts = count()
        self.prepare = NormalizeImages((config.image_size, config.image_size), fit=config.image_resize)
        self.vision = DaViT(config.vision, salts)
        self.projector = Florence2Projector(
            config.vision.dims[-1], config.text.width, config.image_positions, config.image_frames
        )
        self.language = BartEncoder(config.text, salts)
        self.policy = Policy(config, salts)
        self.mix = FlowMix()
        self.space = config.space
        self.register_buffer("shown_A", self.space.shown(config.action_width), persistent=False)
        self.register_buffer("shown_S", self.space.shown(config.state_width), persistent=False)

    @classmethod
    def contract(cls, config: ModelConfig) -> Contract:
        views, size, horizon, width = (
            config.num_image_views,
            config.image_size,
            config.action_horizon,
            config.action_width,
        )
        fields = {
            "images": Field((views, size, size, 3), torch.uint8, "VHWC", 0, 256, free="HW"),
            "image_mask": Field((views,), torch.bool, "V"),
            "tokens": Field((config.max_token_len,), torch.int64, "L", 3, config.text.vocab_size),
            "state": Field((config.state_width,), torch.float32, "S", -1.0, 1.0),
            "embodiment": Field((), torch.int64, "", 0, config.num_domains),
            "actions": Field((horizon, width), torch.float32, "HA", 0.0, 1.0, observation=False),
            "action_mask": Field((horizon, width), torch.bool, "HA", observation=False),
        }
        draws = {
            "noise": DrawSpec((horizon, width), "normal"),
            # One uniform number a step, spread over the batch: (u + i/B) mod (1 - 1e-5).
            "time": DrawSpec((), "stratified", wrap=1.0 - 1e-5),
        }
        rates = (config.attn_dropout, config.mlp_dropout, config.text.dropout, config.vision.drop_path)
        if any(rates) or config.text.attention_dropout or config.text.activation_dropout:
            draws["dropout"] = DrawSpec((), "seed")
        # Views that no sample has stand last, and are not encoded; their zeros stay in the sequence.
        return Contract(fields, draws, (Trim("image_mask", (("images", 1),), keep="prefix"),))

    def encode_frozen(self, batch: Batch) -> Batch:
        """With a frozen vision-language tower, `text_features` [B, T, C] and `view_features` [B, T', C] take the place
        of images and tokens."""
        parts = (self.vision, self.projector, self.language)
        if "text_features" in batch or any(p.requires_grad for part in parts for p in part.parameters()):
            return batch
        with torch.no_grad():
            text, views = self._look(batch, None)
        rest = {name: value for name, value in batch.items() if name not in ("images", "tokens")}
        return Batch(rest, text_features=text, view_features=views)

    def features(self, batch: Batch, seed_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(text with view 0 [B, T, vlm width], the other views' tokens [B, T', vlm width])."""
        batch = self.encode_frozen(batch)
        if "text_features" in batch:
            return batch["text_features"], batch["view_features"]
        return self._look(batch, seed_B)

    def _look(self, batch: Batch, seed_B: Tensor | None) -> tuple[Tensor, Tensor]:
        mask_BV = batch["image_mask"]
        b, given = batch["images"].shape[:2]
        images = self.prepare(batch["images"], self.projector.projection.weight.dtype)
        seed_N = None if seed_B is None else (seed_B[:, None] + torch.arange(given, device=seed_B.device)).flatten()
        features = self.projector(self.vision(images, seed_N)).unflatten(0, (b, given))
        # The features of an absent view are exact zeros, whatever its pixels held.
        zero = torch.zeros((), dtype=features.dtype, device=features.device)
        features_BVND = torch.where(mask_BV[:, :given, None, None], features, zero)
        if given < mask_BV.shape[1]:
            features_BVND = F.pad(features_BVND, (0, 0, 0, 0, 0, mask_BV.shape[1] - given))
        joined = torch.cat([features_BVND[:, 0], self.language.embed(batch["tokens"])], dim=1)
        return self.language(joined, seed_B), features_BVND[:, 1:].flatten(1, 2)

    def predict(self, x_BHA, batch: Batch, time_B, encoded: tuple[Tensor, Tensor], seed_B=None) -> Tensor:
        """The clean action [B, H, A] seen through noisy `x` at `time` (grippers hidden from the input)."""
        zero = torch.zeros((), dtype=x_BHA.dtype, device=x_BHA.device)
        hidden = torch.where(self.shown_A, x_BHA, zero)
        state_BS = torch.where(self.shown_S, batch["state"], zero)
        return self.policy(hidden, state_BS, time_B, *encoded, batch["embodiment"], seed_B)

    def loss(self, batch: Batch, draw: Draw) -> Losses:
        """x_t = t·noise + (1 - t)·action; the network returns the action, and the action space compares."""
        seed_B = draw.get("dropout") if self.training else None
        mask_BHA, time_B = batch["action_mask"], draw["time"]
        # Garbage in masked steps reaches neither the network nor the comparison.
        actions_BHA = batch["actions"].masked_fill(~mask_BHA, 0.0)
        noisy_BHA, _ = self.mix(draw["noise"], actions_BHA, mask_BHA, time_B)
        predicted_BHA = self.predict(noisy_BHA, batch, time_B, self.features(batch, seed_B), seed_B)
        terms = self.space.losses(predicted_BHA, actions_BHA, mask_BHA)
        return Losses(terms, {"predicted": predicted_BHA.detach()})

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return self.space.counts(batch["action_mask"])

    @torch.no_grad()
    def act(self, obs: Batch, draw: Draw, steps: int) -> Tensor:
        """Repeats x_t = t·noise + (1 - t)·action for t = 1 … 1/steps, always with the same noise."""
        encoded = self.features(obs)
        noise_BHA = draw["noise"]
        action_BHA = torch.zeros_like(noise_BHA)
        for i in range(steps, 0, -1):
            t = i / steps
            time_B = torch.full((noise_BHA.shape[0],), t, device=noise_BHA.device)
            action_BHA = self.predict(noise_BHA * t + action_BHA * (1 - t), obs, time_B, encoded).float()
        return self.space.finish(action_BHA)

    def token_count(self, batch: Batch) -> int:
        """Positions of the policy's sequence, soft prompts included; those of absent views are there as zeros."""
        return batch.size * (self.config.sequence + self.config.len_soft_prompts)

    def blocks(self) -> list[BlockGroup]:
        groups = [
            BlockGroup(f"vision.stages.{s}.blocks", tuple(f"vision.stages.{s}.blocks.{i}" for i in range(depth)))
            for s, depth in enumerate(self.config.vision.depths)
        ]
        groups.append(
            BlockGroup("language.layers", tuple(f"language.layers.{i}" for i in range(self.config.text.layers)))
        )
        groups.append(BlockGroup("policy.blocks", tuple(f"policy.blocks.{i}" for i in range(self.config.depth))))
        return groups

    def towers(self) -> dict[str, list[str]]:
        return {
            "vision": ["vision", "projector"],
            "language": ["language"],
            "vlm": ["vision", "projector", "language"],
            "expert": ["policy"],
            "soft_prompts": ["policy.soft_prompts"],
        }

    def keep_fp32(self) -> list[str]:
        """What stands next to robot units; officially a bf16 run casts these, too."""
        return ["policy.action_encoder", "policy.action_decoder"]
