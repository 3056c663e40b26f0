"""The published π0.5 training step as its recipe, on our modules: what `bench.gpu` compares with without OpenPI.

What openpi's PyTorch trainer computes (scripts/train_pytorch.py, gemma_pytorch.py, pi0_pytorch.py), in its order: three
image slots always, one vision call each under its own checkpoint; prompts at full length; prefix and actions in one
joint attention with a dense additive mask, keys repeated for every head, rotary tables made in every layer; the last
layer's prefix too; a checkpoint around every layer and another around all of them (so a layer's forward runs three
times); bf16 weights without masters, `clip_grad_norm_`, AdamW (foreach), `loss.item()`. Vision attention is SDPA.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlaforge.bench.sides import CLIP, LR, Case, Timed, fresh_model
from vlaforge.data.schema import Batch, Draw
from vlaforge.graphs.passes.precision import kept_fp32
from vlaforge.models.blocks.attention import merge_heads
from vlaforge.models.blocks.rotary import apply_rotary, rotary_table

MASKED = -2.3819763e38


def again(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def joint_layer(layer: Any, x_BPD: Tensor, y_BHW: Tensor, condition: Tensor, mask: Tensor, positions: Tensor) -> Any:
    """One layer of both towers, by one masked softmax over [prefix | actions]."""
    language, expert, p = layer.language, layer.expert, x_BPD.shape[1]
    q, k, v = language.qkv(language.input_norm(x_BPD))
    normed_BHW, gate = expert.input_norm(y_BHW, condition)
    q2, k2, v2 = expert.qkv(normed_BHW)
    q, k, v = (torch.cat(pair, dim=2) for pair in ((q, q2), (k, k2), (v, v2)))
    cos, sin = rotary_table(positions, q.shape[-1])
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask
    mixed = merge_heads(scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v)
    x_BPD = x_BPD + language.o_proj(mixed[:, :p])
    x_BPD = x_BPD + language.mlp(language.post_norm(x_BPD))
    y_BHW = expert.add(y_BHW, expert.o_proj(mixed[:, p:]), gate)
    normed_BHW, gate = expert.post_norm(y_BHW, condition)
    return x_BPD, expert.add(y_BHW, expert.mlp(normed_BHW), gate)


def restated_loss(model: Any, batch: Batch, draw: Draw) -> Tensor:
    """The mean over real dimensions that LeRobot reports; the same number as ``model.loss(...).total()``."""
    views = []
    for number in range(batch["images"].shape[1]):
        image = batch["images"][:, number : number + 1]
        views.append(again(lambda image: model.projector(model.vision(model.prepare(image))), image))
    dtype = model.embed.weight.dtype
    text_BLD = model.embed(batch["tokens"]) * math.sqrt(model.config.language.width)
    x_BPD = torch.cat([*(view.to(dtype) for view in views), text_BLD], dim=1)
    tokens = views[0].shape[1]
    valid = torch.cat([batch["image_mask"].repeat_interleave(tokens, dim=1), batch["token_mask"]], dim=1)
    horizon = batch["actions"].shape[1]
    keys_BS = torch.cat([valid, valid.new_ones(valid.shape[0], horizon)], dim=1)
    block = torch.cat([torch.zeros_like(valid), torch.zeros_like(valid[:, :horizon])], dim=1).long()
    block[:, valid.shape[1]] = 1
    block = block.cumsum(1)
    sees = (block[:, None, :] <= block[:, :, None]) & keys_BS[:, None, :] & keys_BS[:, :, None]
    mask = torch.where(sees[:, None], 0.0, MASKED)
    time_B11 = draw["time"][:, None, None]
    actions = batch["actions"].masked_fill(~batch["action_mask"], 0.0)
    noisy = time_B11 * draw["noise"] + (1 - time_B11) * actions
    y_BHW, *conditions = model.embed_actions(noisy, draw["time"])

    def towers(x_BPD: Tensor, y_BHW: Tensor) -> Tensor:
        for layer, condition in zip(model.layers, conditions):
            x_BPD, y_BHW = again(joint_layer, layer, x_BPD, y_BHW, condition, mask, keys_BS.cumsum(1) - 1)
        return y_BHW

    velocity = model.decode(again(towers, x_BPD, y_BHW), conditions[-1])
    losses = (draw["noise"] - actions - velocity.float()).square()
    return losses[batch["action_mask"]].mean()


class Restated:
    """The recipe as a side of a benchmark."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, state: Any = None):
        self.name, self.case, self.device = "official recipe", case, device
        self.model = fresh_model(case, device=device)
        if state is not None:
            self.model.load_state_dict(dict(state))
        kept = kept_fp32(self.model)
        for name, module in self.model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None and name not in kept:
                    parameter.data = parameter.data.to(dtype)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=case.decay, foreach=True)
        self._taken = 0

    def run(self, steps: int) -> Timed:
        timed = Timed()
        for _ in range(steps):
            minibatch = self.case.minibatches[self._taken % len(self.case.minibatches)]
            self._taken += 1
            began = time.perf_counter()
            there = minibatch.to(self.device)
            loss = restated_loss(self.model, there.batch, there.draw)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            timed.losses.append(loss.item())
            timed.seconds.append(time.perf_counter() - began)
        return timed

    def close(self) -> None:
        del self.model, self.optimizer
