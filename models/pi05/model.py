"""π0.5: SigLIP and Gemma read cameras and prompt, an action expert denoises a chunk of actions beside them.

Facts: openpi ``pi0_pytorch.py`` (pi05), LeRobot 0.6.1 ``policies/pi05``; paper arXiv 2504.16054.

The official joint attention is one masked softmax over [prefix | actions]. The prefix never sees the actions, so it is
computed here as what it is: the prefix over itself, and the actions over both. The prefix of the last layer is read by
nobody after its keys and values, so the rest of it is left out.

Axes: B samples, V views, N tokens of a view, L prompt tokens, P = V·N + L prefix tokens, D prefix width, H action
steps, A action dimensions, W expert width, S = P + H, K head width, J = K/2, G key/value heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vlaforge.data.schema import Batch, Contract, Draw, DrawSpec, Field, Trim
from vlaforge.models.action.expert import ExpertLayer, TimeCondition
from vlaforge.models.action.flow import FlowMix, MaskedSquares, euler
from vlaforge.models.base import BlockGroup, EmbodiedModel, Losses, LossTerm
from vlaforge.models.blocks.ahead import LayerConditions
from vlaforge.models.blocks.image import PrepareImages
from vlaforge.models.blocks.norms import AdaRMSNorm, RMSNorm
from vlaforge.models.blocks.rotary import rotary_table
from vlaforge.models.pi05.config import ModelConfig
from vlaforge.models.towers.gemma import GemmaLayer
from vlaforge.models.towers.siglip import Siglip


def position_ids(keys_BS: Tensor) -> Tensor:
    """int64 [B, S]: how many valid tokens stand before each token; padding does not advance the position."""
    return keys_BS.cumsum(1) - 1


class JointLayer(nn.Module):
    """One layer of both towers: the language half reads the prefix, the expert half reads its keys and values.

    Args:
        last: nothing reads this layer's prefix output, so its language half stops at keys and values, and what lies
            behind them is not trained (officially those gradients are None).
    """

    def __init__(self, config: ModelConfig, last: bool):
        super().__init__()
        self.language = GemmaLayer(config.language)
        self.expert = ExpertLayer(config.expert)
        self.last = last
        if last:
            for part in (self.language.qkv.q_proj, self.language.o_proj, self.language.post_norm, self.language.mlp):
                part.requires_grad_(False)

    def forward(
        self, x_BPD: Tensor, y_BHW: Tensor, condition_BW: Tensor, cos_BSJ: Tensor, sin_BSJ: Tensor, keys_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(prefix, actions) → the same, one layer on. Tables and `keys` (True where valid) are of [prefix, actions]."""
        p = x_BPD.shape[1]
        x_BPD, k, v = self.prefix(x_BPD, cos_BSJ[:, :p], sin_BSJ[:, :p], keys_BS[:, :p])
        return x_BPD, self.actions(y_BHW, condition_BW, cos_BSJ[:, p:], sin_BSJ[:, p:], k, v, keys_BS)

    def prefix(
        self, x_BPD: Tensor, cos_BPJ: Tensor, sin_BPJ: Tensor, valid_BP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The language half: (prefix, its keys, its values). The last layer returns the prefix as it came."""
        if self.last:
            return x_BPD, *self.language.keys(x_BPD, cos_BPJ, sin_BPJ)
        return self.language(x_BPD, cos_BPJ, sin_BPJ, valid_BP)

    def actions(
        self,
        y_BHW: Tensor,
        condition_BW: Tensor,
        cos_BHJ: Tensor,
        sin_BHJ: Tensor,
        k: Tensor,
        v: Tensor,
        keys_BS: Tensor,
    ) -> Tensor:
        """The expert half, over the prefix's keys and values."""
        return self.expert(y_BHW, condition_BW, cos_BHJ, sin_BHJ, k, v, keys_BS)


class Model(EmbodiedModel):
    """Batch: images, image_mask, tokens, token_mask, actions, action_mask; draws: noise, time."""

    family = "pi05"
    config: ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        depth, width, action_dim = config.language.depth, config.expert.width, config.max_action_dim
        self.prepare = PrepareImages(config.image_size)
        self.vision = Siglip(config.vision, config.image_size)
        self.projector = nn.Linear(config.vision.width, config.language.width)
        self.embed = nn.Embedding(config.vocab_size, config.language.width)
        nn.init.normal_(self.embed.weight, std=config.language.width**-0.5)
        self.layers = nn.ModuleList(JointLayer(config, last=i == depth - 1) for i in range(depth))
        self.norm = RMSNorm(config.language.width, config.language.eps, offset=1.0).requires_grad_(False)
        self.expert_norm = AdaRMSNorm(width, width, config.expert.eps)
        self.time = TimeCondition(width, config.min_period, config.max_period)
        norms = [[f"layers.{i}.expert.{norm}.dense" for norm in ("input_norm", "post_norm")] for i in range(depth)]
        self.conditions = LayerConditions([*norms, ["expert_norm.dense"]])
        self.action_in = nn.Linear(action_dim, width)
        self.action_out = nn.Linear(width, action_dim)
        self.mix = FlowMix()
        self.errors = MaskedSquares()
        if config.expert_lm_head:
            self.expert_lm_head = nn.Linear(width, config.vocab_size, bias=False).requires_grad_(False)
        self._freeze()

    def _freeze(self) -> None:
        frozen = []
        if self.config.freeze_vision_encoder or self.config.train_expert_only:
            frozen.append(self.vision)
        if self.config.train_expert_only:
            frozen += [self.projector, self.embed, *(layer.language for layer in self.layers)]
        for part in frozen:
            part.requires_grad_(False)

    @classmethod
    def contract(cls, config: ModelConfig) -> Contract:
        views, size, length = config.num_images, config.image_size, config.max_token_len
        horizon, dims = config.action_horizon, config.max_action_dim
        fields = {
            "images": Field((views, size, size, 3), torch.uint8, "VHWC", 0, 256, free="HW"),
            "image_mask": Field((views,), torch.bool, "V"),
            "tokens": Field((length,), torch.int64, "L", 0, config.vocab_size),
            "token_mask": Field((length,), torch.bool, "L"),
            "actions": Field((horizon, dims), torch.float32, "HA", -1.0, 1.0, observation=False),
            "action_mask": Field((horizon, dims), torch.bool, "HA", observation=False),
        }
        draws = {
            "noise": DrawSpec((horizon, dims), "normal"),
            "time": DrawSpec(
                (), "beta", config.time_alpha, config.time_beta, scale=config.time_scale, offset=config.time_offset
            ),
        }
        trims = (
            Trim("image_mask", (("images", 1), ("image_mask", 1)), keep="any"),
            Trim("token_mask", (("tokens", 1), ("token_mask", 1)), keep="prefix", multiple=8),
        )
        # of augmented frames: where each view's pixels come from, and its colour (`data.images.PARAMS`)
        optional = {"placements": Field((views, 16), torch.float32, "VP")}
        return Contract(fields, draws, trims, optional)

    def loss(self, batch: Batch, draw: Draw) -> Losses:
        noise, actions, mask = draw["noise"], batch["actions"], batch["action_mask"]
        x_BPD, valid_BP = self.embed_prefix(batch)
        noisy_BHA, target_BHA = self.mix(noise, actions, mask, draw["time"])
        y_BHW, *conditions = self.embed_actions(noisy_BHA, draw["time"])
        cos, sin, keys_BS = self.positions(valid_BP, y_BHW.shape[1])
        for layer, condition in zip(self.layers, conditions):
            x_BPD, y_BHW = layer(x_BPD, y_BHW, condition, cos, sin, keys_BS)
        velocity_BHA = self.decode(y_BHW, conditions[-1])
        term = LossTerm(*self.errors(velocity_BHA, target_BHA, mask))
        return Losses({"flow": term}, {"target": target_BHA, "velocity": velocity_BHA.detach()})

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"flow": batch["action_mask"].sum().float()}

    @torch.no_grad()
    def act(self, obs: Batch, draw: Draw, steps: int) -> Tensor:
        """The prefix runs once and leaves its keys and values; each step runs the expert alone."""
        noise_BHA = draw["noise"].float()
        x_BPD, valid_BP = self.embed_prefix(obs)
        p = x_BPD.shape[1]
        cos, sin, keys_BS = self.positions(valid_BP, noise_BHA.shape[1])
        cached = []
        for layer in self.layers:
            x_BPD, k, v = layer.prefix(x_BPD, cos[:, :p], sin[:, :p], valid_BP)
            cached.append((k, v))

        def velocity(noisy_BHA: Tensor, time_B: Tensor) -> Tensor:
            y_BHW, *conditions = self.embed_actions(noisy_BHA, time_B)
            for layer, condition, (k, v) in zip(self.layers, conditions, cached):
                y_BHW = layer.actions(y_BHW, condition, cos[:, p:], sin[:, p:], k, v, keys_BS)
            return self.decode(y_BHW, conditions[-1])

        return euler(velocity, noise_BHA, steps)

    def encode_frozen(self, batch: Batch) -> Batch:
        """With a frozen vision tower, `image_features` [B, V, N, vision width] takes the place of the images."""
        if "image_features" in batch or any(parameter.requires_grad for parameter in self.vision.parameters()):
            return batch
        with torch.no_grad():
            features = self._look(batch)
        rest = {name: value for name, value in batch.items() if name not in ("images", "placements")}
        return Batch(rest, image_features=features)

    def _pixels(self, batch: Batch) -> Tensor:
        return self.prepare(batch["images"], placements=batch.get("placements"))

    def _look(self, batch: Batch) -> Tensor:
        """All views in one call of the vision tower: [B, V, N, vision width]."""
        return self.vision(self._pixels(batch)).unflatten(0, batch["image_mask"].shape)

    def embed_prefix(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(embeddings [B, P, D], valid bool [B, P]) of [view 0 | view 1 | … | prompt]."""
        batch = self.encode_frozen(batch)
        seen_BVNC = batch["image_features"] if "image_features" in batch else self._look(batch)
        images_BVND = self.projector(seen_BVNC).to(self.embed.weight.dtype)
        text_BLD = self.embed(batch["tokens"]) * math.sqrt(self.config.language.width)
        valid_BVN = batch["image_mask"][:, :, None].expand(images_BVND.shape[:3])
        x_BPD = torch.cat([images_BVND.flatten(1, 2), text_BLD], dim=1)
        return x_BPD, torch.cat([valid_BVN.flatten(1), batch["token_mask"]], dim=1)

    def embed_actions(self, noisy_BHA: Tensor, time_B: Tensor) -> tuple[Tensor, ...]:
        """(action tokens [B, H, W] in the expert's dtype, one condition a layer, the last norm's condition)."""
        y_BHW = self.action_in(noisy_BHA.to(self.action_in.weight.dtype))
        return y_BHW.to(self.layers[0].expert.o_proj.weight.dtype), *self.conditions(self.time(time_B))

    def positions(self, valid_BP: Tensor, horizon: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rotary tables (cos, sin) and key validity of [prefix, actions], each [B, S, ...]."""
        keys_BS = torch.cat([valid_BP, valid_BP.new_ones(valid_BP.shape[0], horizon)], dim=1)
        language = self.config.language
        return *rotary_table(position_ids(keys_BS), language.head_dim, language.theta), keys_BS

    def decode(self, y_BHW: Tensor, condition_BW: Tensor) -> Tensor:
        """Action tokens after the last layer → velocity, [B, H, A]."""
        normed_BHW, _ = self.expert_norm(y_BHW, condition_BW)
        return self.action_out(normed_BHW.to(self.action_out.weight.dtype))

    def prefix_out(self, x_BPD: Tensor, valid_BP: Tensor) -> Tensor:
        """The language tower's own output [B, P, D], last layer and final norm included. Training does not need it."""
        cos, sin, _ = self.positions(valid_BP, 0)
        for layer in self.layers:
            x_BPD, _, _ = layer.language(x_BPD, cos, sin, valid_BP)
        return self.norm(x_BPD)

    def token_count(self, batch: Batch) -> int:
        """Positions of the joint attention: of all views in the batch, the prompt and the actions."""
        samples, views = batch["image_mask"].shape
        return samples * (views * self.config.image_tokens + batch["tokens"].shape[1] + self.config.action_horizon)

    def blocks(self) -> list[BlockGroup]:
        vision = tuple(f"vision.layers.{i}" for i in range(self.config.vision.depth))
        joint = tuple(f"layers.{i}" for i in range(self.config.language.depth))
        return [BlockGroup("vision.layers", vision), BlockGroup("layers", joint)]

    def towers(self) -> dict[str, list[str]]:
        depth = range(self.config.language.depth)
        return {
            "vision": ["vision"],
            "projector": ["projector"],
            "language": ["embed", "norm", *(f"layers.{i}.language" for i in depth)],
            "expert": [
                *(f"layers.{i}.expert" for i in depth), "expert_norm", "time", "action_in", "action_out",
                *(["expert_lm_head"] if self.config.expert_lm_head else []),
            ],
        }  # fmt: skip

    def keep_fp32(self) -> list[str]:
        """OpenPI's choice (patch and position tables, RMS norms and their modulations), plus action and time MLPs."""
        return [
            "vision.patch", "vision.positions", "layers.*.input_norm", "layers.*.post_norm", "norm", "expert_norm",
            "time", "action_in", "action_out",
        ]  # fmt: skip
