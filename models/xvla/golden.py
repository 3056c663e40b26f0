"""The official X-VLA's recorded results (LeRobot 0.6.1) in our terms, for `forge-parity`.

Axes: B samples, V views, H action steps, A action dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.golden import Base, Folder, Quantity, Recorder
from vlaforge.models.towers.florence2 import BartConfig, DaViTConfig
from vlaforge.models.xvla.config import ModelConfig
from vlaforge.models.xvla.convert import LAYOUTS
from vlaforge.models.xvla.model import Model, time_embedding

INSIDE = "before lowering"


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The hyperparameters of `config.json`."""
    vision = DaViTConfig(
        dims=tuple(raw["dim_embed"]), depths=tuple(raw["depths"]), heads=tuple(raw["vheads"]),
        groups=tuple(raw["vheads"]), window=raw["window"],
    )  # fmt: skip
    text = BartConfig(
        vocab_size=raw["vocab"], width=raw["proj"], layers=raw["tlayers"], heads=raw["theads"], mlp=raw["ffn"],
        max_positions=raw["max_pos"],
    )  # fmt: skip
    return ModelConfig(
        vision=vision, text=text, image_positions=raw["max_pos2d"], image_frames=raw["max_temp"],
        image_size=raw["img"], num_image_views=raw["views"], max_token_len=raw["L"], hidden_size=raw["hidden"],
        depth=raw["depth"], num_heads=raw["heads"], num_domains=raw["num_domains"], len_soft_prompts=raw["soft"],
        dim_time=raw["dim_time"], max_len_seq=raw["max_len_seq"], use_hetero_proj=raw["hetero"],
        action_mode=raw["action_mode"], action_horizon=raw["chunk"], action_dim=raw["act"],
        max_action_dim=raw["max_act"], max_state_dim=raw["max_state"], num_inference_steps=raw["steps"],
    )  # fmt: skip


class Golden(Base):
    layouts = LAYOUTS
    adamw = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    clip = 10.0

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.config = model_config(folder.config)

    def model(self) -> Model:
        return Model(self.config).eval()

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """A tenth of the rate for what has "vlm" in its official name: the tower, and the projection of its output."""
        slow, fast = [], []
        for name, parameter in model.named_parameters():
            towers = name.startswith(("vision.", "projector.", "language.", "policy.vlm_proj."))
            (slow if towers else fast).append(parameter)
        return [{"params": slow, "lr": self.adamw["lr"] * 0.1}, {"params": fast}]

    def inputs(self) -> tuple[Batch, Draw]:
        raw = self.folder.batch
        batch = Batch(
            images=raw["image_input"], image_mask=raw["image_mask"], tokens=raw["input_ids"], state=raw["proprio"],
            embodiment=raw["domain_id"], actions=raw["action"],
            action_mask=torch.ones_like(raw["action"], dtype=torch.bool),
        )  # fmt: skip
        return batch, Draw(noise=raw["noise"], time=raw["t"])

    def quantities(self, plain: Model, lowered: Model) -> Iterator[Quantity]:
        yield from self._losses(lowered)
        yield from self._samples(lowered)
        yield from self._inside(plain)
        yield from self._bfloat16()

    def _losses(self, model: Model) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        with torch.no_grad():
            losses = model(self.cut(batch), draw)
        yield Quantity("loss", losses.total(), "loss")
        for name, term in losses.terms.items():
            yield Quantity(f"loss.{name}", term.weight * term.sum / term.count, "loss")
        predicted = losses.details["predicted"]
        yield Quantity("pred_action", predicted, "output")
        yield Quantity("per_element_sq_err", (predicted - batch["actions"]).square(), "output")

    def _samples(self, model: Model) -> Iterator[Quantity]:
        batch, _ = self.inputs()
        draw = Draw(noise=self.folder.batch["inference_noise"])
        for name in self.folder.expected:
            if match := re.fullmatch(r"sampled_actions_(\d+)steps", name):
                yield Quantity(name, model.act(self.cut(batch), draw, int(match[1])), "sample")

    def _inside(self, model: Model) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        stages, layers, depth = len(self.config.vision.dims), self.config.text.layers, self.config.depth
        names = [f"vision.stages.{i}" for i in range(stages)]
        names += [f"language.layers.{i}" for i in range(layers)] + [f"policy.blocks.{i}" for i in range(depth)]
        names += ["projector", "policy.action_encoder", "policy.norm"]
        last = model.policy.blocks[-1]
        with torch.no_grad(), Recorder(model, tuple(names)) as seen:
            rows, last.rows = last.rows, None  # officially the last block computes what nobody reads, too
            model(batch, draw)
            last.rows = rows
            text, views = model.features(batch)
        first = {name: values[0] for name, values in seen.items()}
        valid = batch["image_mask"].flatten()
        # Officially only views that are there are encoded; ours are all encoded, and the absent ones zeroed.
        for i in range(stages):
            yield Quantity(f"davit_stage{i}_out", first[f"vision.stages.{i}"][valid].permute(0, 3, 1, 2), note=INSIDE)
        yield Quantity("image_features_valid_views", first["projector"][valid], note=INSIDE)
        yield Quantity("vlm_features", text, note=INSIDE)
        yield Quantity("aux_visual_inputs", views, note=INSIDE)
        for i in range(layers):
            yield Quantity(f"text_encoder_layer{i}_out", first[f"language.layers.{i}"], note=INSIDE)
        yield Quantity("time_embedding", time_embedding(draw["time"], self.config.dim_time), note=INSIDE)
        yield Quantity("action_encoder_out", first["policy.action_encoder"], note=INSIDE)
        for i in range(depth):
            yield Quantity(f"policy_block{i}_out", first[f"policy.blocks.{i}"], note=INSIDE)
        yield Quantity("policy_norm_out", first["policy.norm"], note=INSIDE)

    def _bfloat16(self) -> Iterator[Quantity]:
        """Officially the whole model, noise and time are cast; the network's output stays bf16 until the loss."""
        if "bf16_loss" not in self.folder.expected:
            return
        model = self.model()
        self.load(model)
        model = model.to(torch.bfloat16)
        batch, draw = self.inputs()
        with torch.no_grad():
            loss: Tensor = model(batch, draw).total()
        yield Quantity("bf16_loss", loss, "bfloat16", "all weights in bf16")
