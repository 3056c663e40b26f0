"""FastWAM's two experts and the layer in which they meet: each has its own block, one attention serves both.

Axes: B samples, S video tokens, N tokens of a frame, G groups of video tokens with one time each (frames), A action
tokens, D and E widths of the video and the action expert, H heads, K channels of a head, L text tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vlaforge.models.fastwam.config import ModelConfig
from vlaforge.models.video.block import WanBlock
from vlaforge.models.video.embed import Head, PatchEmbedding, TextEmbedding, TimeEmbedding
from vlaforge.models.video.masks import VIDEO_RULES, Plan, Rule, Segment, attend, plan

KeyValue = tuple[Tensor, Tensor]


class VideoExpert(nn.Module):
    """What stands before and after the video blocks: patches, text, time; head."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim = config.video.dim
        self.patch_embedding = PatchEmbedding(config.latent_channels, dim, config.patch)
        self.text_embedding = TextEmbedding(config.text_dim, dim)
        self.time = TimeEmbedding(dim, config.freq_dim)
        self.head = Head(dim, config.latent_channels, config.patch, config.eps)


class ActionExpert(nn.Module):
    """What stands before and after the action blocks. The head is a plain projection, without norm or modulation."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        dim = config.action.dim
        self.action_encoder = nn.Linear(config.max_action_dim, dim)
        self.text_embedding = TextEmbedding(config.text_dim, dim)
        self.time = TimeEmbedding(dim, config.freq_dim)
        self.head = nn.Linear(dim, config.max_action_dim)


def segments(config: ModelConfig) -> list[Segment]:
    """The training sequence: [first frame | noisy frames | (idm) conditioning frames | actions].

    ``idm`` shows the video twice, denoised and as a condition. The first frame is clean, at time 0 and sees itself
    alone
    in both copies, so that one copy of it serves both: the result is the same and a sixth of the tokens is saved.
    """
    frames, n = config.latent_size[0], config.frame_tokens
    out = [Segment(n, "video", 0, "clean")]
    for role in ("noisy", "clean") if config.variant == "idm" else ("noisy",):
        out += [Segment(n, "video", frame, role) for frame in range(1, frames)]
    return [*out, Segment(config.action_horizon, "action")]


def rule(config: ModelConfig) -> Rule:
    """Which segment sees which, by variant. Video never sees actions."""
    video_rule, variant = VIDEO_RULES[config.video_attention], config.variant

    def sees(query: Segment, key: Segment) -> bool:
        if query.modality == "video":
            same_copy = key.chunk == 0 or query.chunk == 0 or key.role == query.role
            return key.modality == "video" and same_copy and video_rule(query, key)
        if key.modality == "action" or variant == "joint":
            return True
        return key.chunk == 0 if variant == "uncond" else key.role == "clean"

    return sees


class MoTLayer(nn.Module):
    """One layer of both experts.

    Training runs `forward` over the whole sequence. Sampling extends a cache: the given frame first, then frames or
    actions that look at it (`extend`, `act`); what is given never looks at what is sampled, so its keys stay.

    `last`: the layer whose video tokens reach the loss through the denoised frames alone; the other tokens give keys
    and values there and nothing else.
    """

    def __init__(self, config: ModelConfig, last: bool):
        super().__init__()
        widths = (config.heads, config.head_dim, config.eps)
        self.video = WanBlock(config.video.dim, config.video.ffn_dim, *widths)
        self.action = WanBlock(config.action.dim, config.action.ffn_dim, *widths)
        frames, n = config.latent_size[0], config.frame_tokens
        self.frames = slice(1, frames) if last else None
        self.tokens = slice(n, frames * n) if last else None
        self.calls: Plan = plan(segments(config), rule(config), self._wanted if last else lambda _: True)

    @staticmethod
    def _wanted(segment: Segment) -> bool:
        return segment.modality == "action" or segment.role == "noisy"

    def forward(
        self,
        video_BSD: Tensor,
        action_BAE: Tensor,
        video_time_BG6D: Tensor,
        action_time_B16E: Tensor,
        video_text_BLD: Tensor,
        action_text_BLE: Tensor,
        video_cos: Tensor,
        video_sin: Tensor,
        action_cos: Tensor,
        action_sin: Tensor,
        text_bias: Tensor | None = None,
        *projections: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(video, action) tokens after the layer; of the video the denoised frames alone in the last layer.
        `projections`: as for `texts`."""
        six, action_six = self.video.modulations(video_time_BG6D), self.action.modulations(action_time_B16E)
        video_q, video_k, video_v = self.video.project(video_BSD, six, video_cos, video_sin)
        action_q, action_k, action_v = self.action.project(action_BAE, action_six, action_cos, action_sin)
        wanted_q = video_q if self.tokens is None else video_q[:, self.tokens]
        mixed = attend(
            self.calls,
            {"video": wanted_q, "action": action_q},
            {"video": video_k, "action": action_k},
            {"video": video_v, "action": action_v},
            self.video.self_attn.mix,
        )
        if self.tokens is not None:
            video_BSD, six = video_BSD[:, self.tokens], tuple(part[:, self.frames] for part in six)
        video_text, action_text = self.texts(video_text_BLD, action_text_BLE, *projections)
        return (
            self.video.finish(video_BSD, mixed["video"], six, video_text, text_bias),
            self.action.finish(action_BAE, mixed["action"], action_six, action_text, text_bias),
        )

    def texts(
        self, video_text_BLD: Tensor, action_text_BLE: Tensor, *projections: Tensor | None
    ) -> tuple[KeyValue, KeyValue]:
        """Keys and values of the text for both experts: the same in every sampling step. `projections`: the video
        expert's k and v of it and the action expert's, where they are there already."""
        return self.video.text(video_text_BLD, *projections[:2]), self.action.text(action_text_BLE, *projections[2:])

    def extend(
        self, x_BSD: Tensor, time: Tensor, text: KeyValue, table: KeyValue, seen: KeyValue | None, bias: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        """Video tokens that see `seen` and one another → (tokens, keys and values of both together)."""
        six = self.video.modulations(time)
        q, *new = self.video.project(x_BSD, six, *table)
        k, v = new if seen is None else (torch.cat(pair, dim=1) for pair in zip(seen, new))
        return self.video.finish(x_BSD, self.video.self_attn.mix(q, k, v), six, text, bias), (k, v)

    def act(
        self, x_BAE: Tensor, time: Tensor, text: KeyValue, table: KeyValue, seen: KeyValue, bias: Tensor | None
    ) -> Tensor:
        """Action tokens that see `seen` and one another → tokens."""
        six = self.action.modulations(time)
        q, *new = self.action.project(x_BAE, six, *table)
        k, v = (torch.cat(pair, dim=1) for pair in zip(seen, new))
        return self.action.finish(x_BAE, self.action.self_attn.mix(q, k, v), six, text, bias)
