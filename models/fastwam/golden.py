"""The official FastWAM's recorded results (all three classes) in our terms, for `forge-parity`.

Axes: B samples, S video tokens, N tokens of a frame, F latent frames, H action steps, L text tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.fastwam.config import ExpertConfig, ModelConfig, ScheduleConfig
from vlaforge.models.fastwam.convert import LAYOUTS
from vlaforge.models.fastwam.experts import rule
from vlaforge.models.fastwam.model import Model
from vlaforge.models.golden import Base, Folder, Quantity, Recorder
from vlaforge.models.video.masks import Segment, dense, frame_segments
from vlaforge.models.video.text import Umt5Config
from vlaforge.models.video.vae import VaeConfig

CLASSES = {"": "uncond", "joint.": "joint", "idm.": "idm"}
"""Beginning of the recorded names → variant; all have the same weights."""


def model_config(raw: dict[str, Any], variant: str = "uncond") -> ModelConfig:
    """The hyperparameters of `config.json`. Encoders are not run; latents and context are recorded."""
    video, action, settings = raw["video_dit_config"], raw["action_dit_config"], raw["settings"]
    return ModelConfig(
        variant=variant,
        video=ExpertConfig(video["hidden_dim"], video["ffn_dim"]),
        action=ExpertConfig(action["hidden_dim"], action["ffn_dim"]),
        layers=video["num_layers"],
        heads=video["num_heads"],
        head_dim=video["attn_head_dim"],
        text_dim=video["text_dim"],
        text_tokens=settings["L"],
        freq_dim=video["freq_dim"],
        latent_channels=video["in_dim"],
        patch=tuple(video["patch_size"]),
        height=settings["H"],
        width=settings["W"],
        video_frames=settings["Tv"],
        max_action_dim=settings["adim"],
        max_state_dim=settings["pdim"],
        num_inference_steps=settings["steps"],
        video_attention=video["video_attention_mask_mode"],
        video_schedule=ScheduleConfig(settings["vshift"], settings["vshift"]),
        action_schedule=ScheduleConfig(settings["ashift"], settings["ashift"]),
        lambda_video=settings["lv"],
        lambda_action=settings["la"],
        video_source="latents",
        text_source="context",
        encoded_dtype="float32",
        vae=VaeConfig(dtype="float32"),
        text=Umt5Config(dim=video["text_dim"], dtype="float32"),
        eps=video["eps"],
    )


class Golden(Base):
    layouts = LAYOUTS

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.config = model_config(folder.config)

    def model(self) -> Model:
        return Model(self.config)

    def inputs(self) -> tuple[Batch, Draw]:
        """Padded rows of the text are zero vectors officially; the mask says so here, and lets a plan cut them."""
        raw = self.folder.batch
        valid_BH = ~raw["action_is_pad"].bool()
        batch = Batch(
            latents=raw["input_latents"],
            context=raw["context"],
            token_mask=raw["context"].abs().amax(-1) > 0,
            state=raw["proprio"][:, 0],
            frame_mask=~raw["image_is_pad"].bool(),
            actions=raw["action"],
            action_mask=valid_BH[:, :, None].expand_as(raw["action"]).contiguous(),
            action_fill=raw["action"],
        )
        draw = Draw(
            noise=raw["noise_action"],
            time=raw["u_action"],
            video_noise=raw["noise_video"],
            video_time=raw["u_video"],
            cond_noise=raw["idm_noise_cond"],
            cond_time=raw["idm_u_cond"],
            cond_select=raw["idm_u_cond_select"],
        )
        return batch, draw

    def quantities(self, plain: Model, lowered: Model) -> Iterator[Quantity]:
        yield from self._losses("", lowered)
        yield from self._weights(lowered)
        yield from self._inside()
        yield from self._samples("", lowered)
        for prefix, variant in CLASSES.items():
            if variant != "uncond":
                model = self._variant(variant)
                self.lower(model)
                yield from self._losses(prefix, model)
                yield from self._total_norm(prefix, model)
                yield from self._whole(prefix, variant)
                yield from self._samples(prefix, model)

    def _variant(self, variant: str, skip_unused: bool = True) -> Model:
        """Another class with the folder's weights; `skip_unused` False computes what no loss reads."""
        model = Model(replace(self.config, variant=variant, skip_unused=skip_unused))
        self.load(model)
        return model

    def _losses(self, prefix: str, model: Model) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        with torch.no_grad():
            losses = model(self.cut(batch), draw)
        yield Quantity(f"{prefix}loss", losses.total(), "loss")
        for name, term in (("video", losses.terms["video_loss"]), ("action", losses.terms["action_loss"])):
            yield Quantity(f"{prefix}loss_{name}_weighted", term.weight * term.sum / term.count, "loss")

    def _weights(self, model: Model) -> Iterator[Quantity]:
        _, draw = self.inputs()
        for name, flow, time in (
            ("video", model.video_flow, draw["video_time"]),
            ("action", model.action_flow, draw["time"]),
        ):
            yield Quantity(f"weight_{name}", flow.weight(flow.time(time)))
        times, deltas = model.action_flow.sampling(self.config.num_inference_steps)
        yield Quantity("infer_action.timesteps", torch.tensor(times))
        yield Quantity("infer_action.deltas", torch.tensor(deltas))

    def _total_norm(self, prefix: str, model: Model) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        model(self.cut(batch), draw).total().backward()
        gradients = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        yield Quantity(f"{prefix}grad_norm_total", torch.stack(gradients).sum().sqrt(), "norm")

    def _whole(self, prefix: str, variant: str) -> Iterator[Quantity]:
        """The mask, and predictions of all frames, the first (which no loss reads) among them."""
        yield Quantity(f"{prefix}act.attention_mask", self._mask(variant), "exact", inside=True)
        batch, draw = self.inputs()
        with torch.no_grad():
            details = self._variant(variant, skip_unused=False)(batch, draw).details
        for name in ("pred_video", "pred_action"):
            yield Quantity(f"{prefix}act.{name}", details[name], "output", inside=True)

    def _mask(self, variant: str) -> Tensor:
        """Dense, in the official order [noisy video | conditioning video (idm) | actions], where both copies of the
        video have their own first frame; ours is shared, and is seen by whom each of the two is seen."""
        config = replace(self.config, variant=variant)
        frames, n = config.latent_size[0], config.frame_tokens
        copies = [frame_segments(frames, n, "noisy")]
        copies += [frame_segments(frames, n, "clean")] if variant == "idm" else []
        allowed = rule(config)

        def sees(query: Segment, key: Segment) -> bool:
            if query.modality == key.modality == "video":
                return query.role == key.role and allowed(query, key)
            own_first = variant != "idm" or key.role == "clean"
            return allowed(query, key) and (key.modality == "action" or own_first)

        return dense([*(part for copy in copies for part in copy), Segment(config.action_horizon, "action")], sees)

    def _inside(self) -> Iterator[Quantity]:
        """Activations of the default class, with every token computed."""
        yield from self._whole("", "uncond")
        model, layers = self._variant("uncond", skip_unused=False), range(self.config.layers)
        sides = {
            "attn_in": "self_attn.qkv:in",
            "mixed_attn_out": "self_attn.o:in",
            "cross_attn_out": "cross_attn.o",
            "ffn_out": "ffn",
        }
        names = [f"layers.{i}.{half}.{path}" for i in layers for half in ("video", "action") for path in sides.values()]
        names += [f"{half}.{part}" for half in ("video", "action") for part in ("time", "text_embedding")]
        names.append(f"layers.{self.config.layers - 1}")
        batch, draw = self.inputs()
        with torch.no_grad(), Recorder(model, tuple(names)) as seen:
            model(batch, draw)
        for half, out in zip(("video", "action"), seen[names[-1]][0]):
            for i in layers:
                for name, path in sides.items():
                    value = seen[f"layers.{i}.{half}.{path}"][0]
                    value = value[0] if path.endswith(":in") else value
                    yield Quantity(f"act.{half}.L{i}.{name}", value, inside=True)
            modulation_BG6D = seen[f"{half}.time"][0][1]
            if half == "video":  # officially one a token; ours one a frame
                modulation_BG6D = modulation_BG6D.repeat_interleave(self.config.frame_tokens, dim=1)
            else:
                modulation_BG6D = modulation_BG6D[:, 0]
            yield Quantity(f"act.{half}.t_mod", modulation_BG6D, inside=True)
            yield Quantity(f"act.{half}.context", seen[f"{half}.text_embedding"][0], inside=True)
            yield Quantity(f"act.{half}.tokens_out", out, inside=True)

    def _samples(self, prefix: str, model: Model) -> Iterator[Quantity]:
        raw, steps = self.folder.batch, self.config.num_inference_steps
        obs = Batch(
            latents=raw["infer_first_frame_latents"],
            context=raw["infer_context"],
            token_mask=torch.ones(raw["infer_context"].shape[:2], dtype=torch.bool),
            state=raw["infer_proprio"],
        )
        draw = Draw(noise=raw["infer_noise_action"], video_noise=raw["infer_noise_video"])
        expected = self.folder.expected
        if f"{prefix}infer_action.action" in expected:
            yield Quantity(f"{prefix}infer_action.action", model.act(obs, draw, steps)[0], "sample")
        if f"{prefix}infer_joint.action" in expected:
            actions, latents = model.sample(obs, draw, steps, video=True)
            yield Quantity(f"{prefix}infer_joint.action", actions[0], "sample")
            yield Quantity(f"{prefix}infer_joint.video_latents", latents, "sample")
