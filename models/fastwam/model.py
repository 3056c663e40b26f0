"""FastWAM: a video expert (Wan2.2-TI2V-5B) and an action expert that share the attention of every layer.

Facts: github.com/yuantianyuan01/FastWAM @ 45d8e14 (arXiv 2603.16666), classes FastWAM, FastWAMJoint, FastWAMIDM.

Axes: B samples, T pixel frames, C latent channels, F latent frames, h w latent pixels, G groups of video tokens with
one time each, S video tokens, L text tokens, H action horizon, A action and P proprioception width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Batch, Contract, Draw, DrawSpec, Field, Trim
from vlaforge.models.base import BlockGroup, EmbodiedModel, Losses, LossTerm
from vlaforge.models.blocks.ahead import LayerKeys
from vlaforge.models.fastwam.config import ModelConfig
from vlaforge.models.fastwam.experts import ActionExpert, KeyValue, MoTLayer, VideoExpert
from vlaforge.models.fastwam.sampling import Sampler
from vlaforge.models.video.canvas import compose
from vlaforge.models.video.embed import unpatch
from vlaforge.models.video.frozen import DTYPES
from vlaforge.models.video.rope import cached_table
from vlaforge.models.video.text import Umt5
from vlaforge.models.video.vae import WanVae


class Model(EmbodiedModel):
    """Batch: images or latents, tokens or context, token_mask, frame_mask, state, actions, action_mask, action_fill.

    Draws: noise and time of the actions, video_noise and video_time; ``idm``: cond_noise, cond_time, cond_select.
    """

    family = "fastwam"
    config: ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.video, self.action = VideoExpert(config), ActionExpert(config)
        self.proprio_encoder = nn.Linear(config.max_state_dim, config.text_dim) if config.max_state_dim else None
        last = config.layers - 1 if config.skip_unused else None
        self.layers = nn.ModuleList(MoTLayer(config, last=i == last) for i in range(config.layers))
        self.video_keys, self.action_keys = (
            LayerKeys([[f"layers.{i}.{expert}.cross_attn.{name}" for name in "kv"] for i in range(config.layers)])
            for expert in ("video", "action")
        )
        self.video_flow, self.action_flow = config.video_schedule.flow(), config.action_schedule.flow()
        # Not modules: the frozen encoders have no part in parameters, checkpoints or wrappers.
        self.vae, self.text = WanVae(config.vae), Umt5(config.text)

    # ------------------------------------------------------------------------------------------------ contract

    @classmethod
    def contract(cls, config: ModelConfig) -> Contract:
        latents = (config.latent_channels, *config.latent_size)
        actions = (config.action_horizon, config.max_action_dim)
        fields: dict[str, Field] = {}
        if config.video_source == "pixels":
            shape = (1, config.video_frames, config.height, config.width, 3)
            fields["images"] = Field(shape, torch.uint8, "VTHWC", 0, 256, free="VHW")
        else:
            fields["latents"] = Field(latents, torch.float32, "CFHW", -2.0, 2.0)
        if config.text_source == "tokens":
            fields["tokens"] = Field((config.text_tokens,), torch.int64, "L", 0, config.text.vocab)
        else:
            fields["context"] = Field((config.text_tokens, config.text_dim), torch.float32, "LD", -1.0, 1.0)
        fields["token_mask"] = Field((config.text_tokens,), torch.bool, "L")
        if config.max_state_dim:
            fields["state"] = Field((config.max_state_dim,), torch.float32, "S", -1.0, 1.0)
        fields |= {
            "frame_mask": Field((config.video_frames,), torch.bool, "T", observation=False),
            "actions": Field(actions, torch.float32, "HA", -1.0, 1.0, observation=False),
            "action_mask": Field(actions, torch.bool, "HA", observation=False),
            "action_fill": Field(actions, torch.float32, "HA", -1.0, 1.0, observation=False),
        }
        draws = {
            "noise": DrawSpec(actions),
            "time": DrawSpec((), "uniform"),
            "video_noise": DrawSpec(latents),
            "video_time": DrawSpec((), "uniform"),
        }
        if config.variant == "idm":
            draws |= {
                "cond_noise": DrawSpec(latents),
                "cond_time": DrawSpec((), "uniform"),
                "cond_select": DrawSpec((), "uniform"),
            }
        # The mask stays whole: the model must know how many rows of padding the published sequence has.
        text = "tokens" if config.text_source == "tokens" else "context"
        return Contract(fields, draws, (Trim("token_mask", ((text, 1),), "prefix", 8),))

    # ------------------------------------------------------------------------------------------------ encoders

    @property
    def frozen_fields(self) -> dict[str, tuple[str, Callable[[Batch], Tensor]]]:
        """Field that a frozen encoder makes → (field it reads, how it is made)."""
        return {"latents": ("images", self.encode_video), "context": ("tokens", self.encode_text)}

    @torch.no_grad()
    def encode_frozen(self, batch: Batch) -> Batch:
        """`images` → `latents` [B, C, F, h, w], `tokens` → `context` [B, L, D]; fp32."""
        online = {"latents": self.config.video_source == "pixels", "context": self.config.text_source == "tokens"}
        made = {
            name: encode(batch)
            for name, (source, encode) in self.frozen_fields.items()
            if name not in batch and (online[name] or source in batch)
        }
        if not made:
            return batch
        read = {self.frozen_fields[name][0] for name in made}
        return Batch({name: value for name, value in batch.items() if name not in read}, **made)

    def frozen_networks(self, device: torch.device | str) -> dict[str, nn.Module]:
        online = {"vae": self.config.video_source == "pixels", "text": self.config.text_source == "tokens"}
        return {name: getattr(self, name).net(device) for name, used in online.items() if used}

    def encode_video(self, batch: Batch) -> Tensor:
        """Latents of `images`: the cameras' frames, or their ready canvas. fp32, rounded to `encoded_dtype`."""
        config = self.config
        return self._round(self.vae.encode(compose(batch["images"], config.layout, config.height, config.width)))

    def encode_text(self, batch: Batch) -> Tensor:
        """Context of `tokens`, perhaps trimmed, and their whole `token_mask`. fp32, rounded to `encoded_dtype`.

        The encoder always sees the whole length, so that a trimmed batch has the very numbers of an untrimmed one.
        """
        ids_BL, mask_BM = batch["tokens"], batch["token_mask"]
        ids_BM = nn.functional.pad(ids_BL, (0, mask_BM.shape[1] - ids_BL.shape[1]))
        return self._round(self.text.encode(ids_BM, mask_BM)[:, : ids_BL.shape[1]])

    def _round(self, x: Tensor) -> Tensor:
        return x.to(DTYPES[self.config.encoded_dtype]).float()

    # ------------------------------------------------------------------------------------------------ inputs

    def _context(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """(text rows, the state's row and perhaps one row for cut padding [B, L', D]; bias of the scores [L']).

        Padded rows of the text are zero vectors that everybody attends to. They all have the same key and value, so the
        n rows that trimming has cut are one zero row whose score is raised by log n: the same softmax.
        """
        dtype = self.action.text_embedding[0].weight.dtype
        context, mask = batch["context"], batch["token_mask"]
        rows = context.shape[1]
        parts = [(context * mask[:, :rows, None]).to(dtype)]
        if self.proprio_encoder is not None:
            parts.append(self.proprio_encoder(batch["state"].to(dtype))[:, None])
        cut, bias = mask.shape[1] - rows, None
        if cut:
            parts.append(torch.zeros_like(parts[0][:, :1]))
            length = sum(part.shape[1] for part in parts)
            bias = nn.functional.pad(torch.zeros(length - 1, device=context.device), (0, 1), value=math.log(cut))
        return torch.cat(parts, dim=1), bias

    def _tables(self, device: torch.device) -> tuple[KeyValue, KeyValue]:
        """Rotary (cos, sin) of the video grid and of the actions."""
        config = self.config
        video = cached_table(*config.grid, config.head_dim, device)
        if config.variant == "idm":  # the second copy stands where the first does, without its first frame
            n = config.frame_tokens
            video = tuple(torch.cat([part, part[n:]]) for part in video)
        return video, cached_table(config.action_horizon, 0, 0, config.head_dim, device)

    # ------------------------------------------------------------------------------------------------ training

    def loss(self, batch: Batch, draw: Draw) -> Losses:
        """Velocity errors of video and actions at independent times, each weighed by its time's bell weight.

        Video: mean over (C, h, w) of a frame, then over the sample's valid latent frames but the first. Actions: mean
        over valid (step, dimension) pairs. Both then mean over samples.
        """
        batch = self.encode_frozen(batch)
        latents = batch["latents"]
        actions = torch.where(batch["action_mask"], batch["actions"], batch["action_fill"])
        video_time, action_time = self.video_flow.time(draw["video_time"]), self.action_flow.time(draw["time"])
        noisy_video = self.video_flow.noised(latents, draw["video_noise"], video_time)
        noisy_actions = self.action_flow.noised(actions, draw["noise"], action_time)
        video_in, video_times = self._video_input(latents, noisy_video, video_time, draw)
        pred_video, pred_action = self.velocities(video_in, video_times, noisy_actions, action_time, batch)
        skipped = latents.shape[2] - pred_video.shape[2]
        video_errors_BF = (pred_video - (draw["video_noise"] - latents)[:, :, skipped:]).square().mean((1, 3, 4))
        video_B = _masked_mean(video_errors_BF[:, 1 - skipped :], self._latent_mask(batch["frame_mask"]))
        action_errors = (pred_action - (draw["noise"] - actions)).square()
        action_B = _masked_mean(action_errors.flatten(1), batch["action_mask"].flatten(1))
        count = torch.full((), float(latents.shape[0]), device=latents.device)
        terms = {
            "video_loss": LossTerm(
                (video_B * self.video_flow.weight(video_time)).sum(), count, self.config.lambda_video
            ),
            "action_loss": LossTerm(
                (action_B * self.action_flow.weight(action_time)).sum(), count, self.config.lambda_action
            ),
        }
        details = {"pred_video": pred_video, "pred_action": pred_action, "video_time": video_time, "time": action_time}
        return Losses(terms, {name: value.detach() for name, value in details.items()})

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """Both losses are means over samples."""
        count = torch.full((), float(batch.size), device=batch["action_mask"].device)
        return {"video_loss": count, "action_loss": count}

    def _video_input(self, latents: Tensor, noisy: Tensor, time_B: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Latents along the sequence [B, C, G, h, w], and each frame's time [B, G]; the first frame is clean, at 0."""
        frames = [latents[:, :, :1], noisy[:, :, 1:]]
        times = [torch.zeros_like(time_B)[:, None], time_B[:, None].expand(-1, latents.shape[2] - 1)]
        if self.config.variant == "idm":
            chosen_B = draw["cond_select"] < self.config.cond_noise_prob
            cond_time_B = torch.where(chosen_B, self.video_flow.time(draw["cond_time"]), 0.0)
            frames.append(self.video_flow.noised(latents, draw["cond_noise"], cond_time_B)[:, :, 1:])
            times.append(cond_time_B[:, None].expand_as(times[1]))
        return torch.cat(frames, dim=2), torch.cat(times, dim=1)

    def _latent_mask(self, frame_mask_BT: Tensor) -> Tensor:
        """A latent frame after the first counts when any of its pixel frames is real: bool [B, F-1]."""
        return frame_mask_BT[:, 1:].unflatten(1, (-1, self.config.vae.temporal)).any(dim=2)

    def velocities(
        self, latents: Tensor, video_times_BG: Tensor, actions_BHA: Tensor, action_time_B: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Predicted velocities, fp32: of the denoised frames (all F, or the last F-1 with `skip_unused`), of actions.

        Args:
            latents: along the sequence, [B, C, G, h, w]. video_times_BG: their frames' times.
            batch: for `context`, `token_mask` and `state`.
        """
        context, bias = self._context(batch)
        video_table, action_table = self._tables(latents.device)
        video_t, video_six = self.video.time(video_times_BG)
        _, action_six = self.action.time(action_time_B[:, None])
        video = self.video.patch_embedding(latents)
        action = self.action.action_encoder(actions_BHA.to(video.dtype))
        texts, projections = self.texts(context)
        tables = (*video_table, *action_table)
        for layer, ahead in zip(self.layers, projections):
            video, action = layer(video, action, video_six, action_six, *texts, *tables, bias, *ahead)
        return self._video_head(video, video_t), self.action.head(action).float()

    def texts(self, context_BLD: Tensor) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor | None, ...]]]:
        """The text embedded for the video and the action expert, and by layer the `projections` made of it ahead."""
        video, action = self.video.text_embedding(context_BLD), self.action.text_embedding(context_BLD)
        none = (None, None)
        made = zip(self.video_keys(video), self.action_keys(action))
        return (video, action), [(*(for_video or none), *(for_action or none)) for for_video, for_action in made]

    def _video_head(self, video_BSD: Tensor, time_BGD: Tensor) -> Tensor:
        """Tokens of the denoised frames (the last ones of F, or all tokens of the sequence) → velocities fp32."""
        (frames, rows, columns), n = self.config.grid, self.config.frame_tokens
        if not self.config.skip_unused:
            video_BSD, first = video_BSD[:, : frames * n], 0
        else:
            first = 1
        patches = self.video.head(video_BSD, time_BGD[:, first:frames])
        return unpatch(patches, (frames - first, rows, columns), self.config.patch).float()

    # ------------------------------------------------------------------------------------------------ sampling

    def act(self, obs: Batch, draw: Draw, steps: int) -> Tensor:
        """Normalised actions [B, H, A] from `noise` (and `video_noise` where the variant imagines the video)."""
        return self.sample(obs, draw, steps, video=self.config.variant != "uncond")[0]

    @torch.no_grad()
    def sample(self, obs: Batch, draw: Draw, steps: int, video: bool = False) -> tuple[Tensor, Tensor | None]:
        """(actions [B, H, A], normalised latents [B, C, F, h, w] or None).

        ``uncond`` denoises actions before the first frame's keys, with `video` also the frames; ``joint`` both
        together; ``idm`` first the video, then actions that see it, clean. UserError where the video's mask lets the
        first frame see what is sampled.
        """
        if self.config.video_attention != "first_frame_causal":
            raise UserError("Sampling needs model.video_attention first_frame_causal: the given frame's keys are kept.")
        return Sampler(self, self.encode_observation(obs), draw).run(steps, video)

    def encode_observation(self, obs: Batch) -> Batch:
        """`encode_frozen` for an observation: of the frames the first alone."""
        first = Batch(obs)
        for name, axis in (("images", 2), ("latents", 2)):
            if name in obs:
                first[name] = obs[name].narrow(axis, 0, 1)
        return self.encode_frozen(first)

    # ------------------------------------------------------------------------------------------------ structure

    def token_count(self, batch: Batch) -> int:
        """Positions of the shared attention: video tokens (in ``idm`` twice, but for the given frame) and actions."""
        config = self.config
        frames = config.grid[0] * 2 - 1 if config.variant == "idm" else config.grid[0]
        return batch.size * (frames * config.frame_tokens + config.action_horizon)

    def blocks(self) -> list[BlockGroup]:
        names = tuple(f"layers.{i}" for i in range(self.config.layers))
        return [BlockGroup("layers", names)]

    def towers(self) -> dict[str, list[str]]:
        def tower(name: str) -> list[str]:
            return [name, *(f"layers.{i}.{name}" for i in range(self.config.layers))]

        proprio = {"proprio": ["proprio_encoder"]} if self.config.max_state_dim else {}
        return {"video": tower("video"), "action": tower("action"), **proprio}

    def keep_fp32(self) -> list[str]:
        return ["video.time", "video.time.*", "action.time", "action.time.*", "*.modulation"]


def _masked_mean(values_BN: Tensor, valid_BN: Tensor) -> Tensor:
    """[B]: each sample's mean over its valid entries, 0 when it has none. What is not valid has no influence at all."""
    kept = torch.where(valid_BN, values_BN, torch.zeros((), device=values_BN.device))
    return kept.sum(dim=1) / valid_BN.sum(dim=1).clamp_min(1)
