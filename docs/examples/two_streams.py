"""A step program with two datasets and two losses: actions by flow matching, instructions by next-token prediction.

    forge-run --model pi05 --preset tiny --trainer-type TwoStreams \\
        --trainer-options text_path=../captions,text_weight=0.1 --distributed-strategy ddp

Each step takes micro-batches of the first dataset and one of the second. Both losses are sums over their own counts,
so each is one masked mean over all ranks, whatever the batch sizes. Register it from a package of your own:

    [project.entry-points."vlaforge.trainers"]
    TwoStreams = "my_package.two_streams:TwoStreams"
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Batch, Draw
from vlaforge.models.base import Losses, LossTerm
from vlaforge.models.blocks.attention import Mask, merge_heads
from vlaforge.models.pi05.model import Model
from vlaforge.runtime.programs import FinetuneTrainer, Interleaved, options, stream
from vlaforge.runtime.setup import build_setup


class TwoStreams(FinetuneTrainer):
    """Options: `text_path` is the second dataset; `text_weight` the weight of its loss (default 0.1)."""

    settings = {"text_path": None, "text_weight": "0.1"}

    def __init__(self) -> None:
        self.weight = 0.1

    def loader(self, setup, contract, ranks):
        given = options(setup.args, self.settings)
        if given["text_path"] is None:
            raise UserError("TwoStreams needs a second dataset: --trainer-options text_path=FOLDER.")
        self.weight = float(given["text_weight"])
        args = replace(setup.args, dataset_path=given["text_path"], eval_episodes=None)
        second = build_setup(replace(setup.resolved, args=args))
        loaders = {
            "robot": stream(setup, contract, ranks),
            "text": stream(second, contract, ranks, accumulate=1),
        }
        return Interleaved(loaders, ("robot",) * setup.args.gradient_accumulation_steps + ("text",))

    def micro_batches(self, setup):
        return setup.args.gradient_accumulation_steps + 1

    def counts(self, model, minibatch):
        if minibatch.stream == "text":
            return {"text": targets(minibatch.batch)[1].sum().float()}
        return super().counts(model, minibatch)

    def losses(self, model, minibatch):
        if minibatch.stream != "text":
            return super().losses(model, minibatch)
        losses = model(minibatch.batch, minibatch.draw, next_token_loss)
        return Losses({name: replace(term, weight=self.weight) for name, term in losses.terms.items()})


def targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """(next tokens [B, L-1], whether each is a real token [B, L-1])."""
    return batch["tokens"][:, 1:], batch["token_mask"][:, 1:]


def next_token_loss(model: Model, batch: Batch, draw: Draw) -> Losses:
    """Cross-entropy of each prompt token after the images and the tokens before it, through the language tower."""
    x_BPD, valid_BP = model.embed_prefix(batch)
    cos, sin, _ = model.positions(valid_BP, 0)
    for layer in model.layers:
        part = layer.language
        q, k, v = part.qkv(part.input_norm(x_BPD))
        mask = Mask.causal_padding(valid_BP)
        x_BPD = x_BPD + part.o_proj(
            merge_heads(part.attend(part.rotary(q, cos, sin), part.rotary(k, cos, sin), v, mask))
        )
        x_BPD = x_BPD + part.mlp(part.post_norm(x_BPD))
    tokens, real = targets(batch)
    states_BLD = model.norm(x_BPD)[:, -tokens.shape[1] - 1 : -1]
    logits = F.linear(states_BLD, model.embed.weight).float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none") * real.flatten()
    return Losses({"text": LossTerm(losses.sum(), real.sum().float())})
