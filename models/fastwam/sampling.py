"""Euler sampling of FastWAM with kept keys: the given frame and the text are computed once, not in every step.

The first frame is clean, at time 0, and sees itself alone, so its keys and values are the same in every step of every
variant; official joint sampling computes them anew each time. Text keys and values are the same too.

Axes: as in `model.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.fastwam.experts import KeyValue
from vlaforge.models.video.embed import unpatch
from vlaforge.models.video.rope import cached_table

if TYPE_CHECKING:
    from vlaforge.models.fastwam.model import Model


class Sampler:
    """State of one sampling: embedded text by layer, the first frame's keys by layer, and the noise to start from.

    Args:
        obs: encoded: `latents` [B, C, 1, h, w], `context`, `token_mask`, `state`.
        draw: `noise` [B, H, A]; `video_noise` [B, C, F, h, w] when the video is sampled.
    """

    def __init__(self, model: Model, obs: Batch, draw: Draw):
        self.model, self.config, self.draw = model, model.config, draw
        self.first = obs["latents"]
        self.device, self.batch = self.first.device, self.first.shape[0]
        config, n = model.config, model.config.frame_tokens
        cos, sin = cached_table(*config.grid, config.head_dim, self.device)
        self.first_table, self.rest_table = (cos[:n], sin[:n]), (cos[n:], sin[n:])
        self.action_table = cached_table(config.action_horizon, 0, 0, config.head_dim, self.device)
        context, bias = model._context(obs)
        self.bias = bias
        embedded, projections = model.texts(context)
        self.texts = [layer.texts(*embedded, *ahead) for layer, ahead in zip(model.layers, projections)]
        self.given = self._watch(self.first, 0.0, self.first_table, None)[1]

    def run(self, steps: int, video: bool) -> tuple[Tensor, Tensor | None]:
        """(actions, whole latents or None) after `steps` Euler steps of each modality."""
        if not video:
            return self._actions(steps, self.given), None
        frames = self.draw["video_noise"][:, :, 1:]
        if self.config.variant == "idm":
            for time, delta in self._grid(self.model.video_flow, steps):
                frames = frames + delta * self._watch(frames, time, self.rest_table, self.given)[0]
            seen = self._watch(frames, 0.0, self.rest_table, self.given)[1]
            return self._actions(steps, seen), torch.cat([self.first, frames], dim=2)
        actions = self.draw["noise"]
        grids = (self._grid(flow, steps) for flow in (self.model.video_flow, self.model.action_flow))
        for (time, delta), (action_time, action_delta) in zip(*grids):
            velocity, together = self._watch(frames, time, self.rest_table, self.given)
            seen = together if self.config.variant == "joint" else self.given
            actions = actions + action_delta * self._move(actions, action_time, seen)
            frames = frames + delta * velocity
        return actions, torch.cat([self.first, frames], dim=2)

    def _grid(self, flow, steps: int) -> list[tuple[float, float]]:
        return list(zip(*flow.sampling(steps)))

    def _actions(self, steps: int, seen: list[KeyValue]) -> Tensor:
        actions = self.draw["noise"]
        for time, delta in self._grid(self.model.action_flow, steps):
            actions = actions + delta * self._move(actions, time, seen)
        return actions

    def _watch(
        self, latents: Tensor, time: float, table: KeyValue, seen: list[KeyValue] | None
    ) -> tuple[Tensor, list[KeyValue]]:
        """(velocity of the frames, keys and values by layer of `seen` and the frames) for frames at one time."""
        model, frames = self.model, latents.shape[2]
        time_BG = torch.full((self.batch, frames), time, device=self.device)
        t, six = model.video.time(time_BG)
        x, keys = model.video.patch_embedding(latents), []
        for i, layer in enumerate(model.layers):
            x, kept = layer.extend(x, six, self.texts[i][0], table, seen[i] if seen else None, self.bias)
            keys.append(kept)
        patches = model.video.head(x, t)
        return unpatch(patches, (frames, *self.config.grid[1:]), self.config.patch).float(), keys

    def _move(self, actions: Tensor, time: float, seen: list[KeyValue]) -> Tensor:
        """Velocity of the actions at one time."""
        model = self.model
        _, six = model.action.time(torch.full((self.batch, 1), time, device=self.device))
        x = model.action.action_encoder(actions.to(model.action.action_encoder.weight.dtype))
        for i, layer in enumerate(model.layers):
            x = layer.act(x, six, self.texts[i][1], self.action_table, seen[i], self.bias)
        return model.action.head(x).float()
