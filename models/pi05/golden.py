"""The official π0.5's recorded results (LeRobot 0.6.1 naming) in our terms, for `forge-parity`.

Axes: B samples, V views, N tokens of a view, P prefix tokens, H action steps, A padded action dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.action.flow import squares
from vlaforge.models.golden import Base, Folder, Quantity, Recorder, to_bfloat16
from vlaforge.models.pi05.config import ModelConfig
from vlaforge.models.pi05.convert import LAYOUTS
from vlaforge.models.pi05.model import Model, position_ids
from vlaforge.models.towers.gemma import GemmaConfig
from vlaforge.models.towers.siglip import SiglipConfig


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The hyperparameters of `config.json`; the names there are those of the official configs."""
    shared = {"eps": raw["rms_norm_eps"], "theta": raw["rope_theta"]}
    language, expert = (GemmaConfig(**raw[tower], **shared) for tower in ("vlm", "exp"))
    vis = raw["vis"]
    return ModelConfig(
        vision=SiglipConfig(
            vis["hidden_size"], vis["num_hidden_layers"], vis["num_attention_heads"], vis["intermediate_size"],
            raw["patch"], raw["vision_layer_norm_eps"],
        ),
        language=language, expert=expert, vocab_size=raw["vocab"], image_size=raw["img"], num_images=raw["views"],
        max_token_len=raw["L"], action_dim=raw["act"], state_dim=raw["state"], action_horizon=raw["chunk"],
        max_action_dim=raw["max_act"], max_state_dim=raw["max_state"], num_inference_steps=raw["steps"],
        min_period=raw["min_period"], max_period=raw["max_period"],
    )  # fmt: skip


class Golden(Base):
    layouts = LAYOUTS
    adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.config = model_config(folder.config)
        self.depth, self.views = self.config.language.depth, self.config.num_images

    def model(self) -> Model:
        return Model(self.config)

    def inputs(self) -> tuple[Batch, Draw]:
        raw, dims = self.folder.batch, self.config.action_dim
        mask = torch.zeros_like(raw["actions"], dtype=torch.bool)
        mask[..., :dims] = True
        batch = Batch(
            images=torch.stack([raw[f"images.{i}"] for i in range(self.views)], dim=1),
            image_mask=torch.stack([raw[f"img_masks.{i}"] for i in range(self.views)], dim=1),
            tokens=raw["tokens"],
            token_mask=raw["masks"],
            actions=raw["actions"],
            action_mask=mask,
        )
        return batch, Draw(noise=raw["noise"], time=raw["time"])

    def quantities(self, plain: Model, lowered: Model) -> Iterator[Quantity]:
        yield from self._losses(lowered)
        yield from self._samples(lowered)
        yield from self._missing_camera(lowered)
        yield from self._inside(plain)
        yield from self._bfloat16()

    def _run(self, model: Model, batch: Batch, draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            losses = model(self.cut(batch), draw)
        details = losses.details
        details["losses"] = squares(details["velocity"], details["target"], batch["action_mask"])
        return losses.total(), details

    def _losses(self, model: Model) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        dims = self.config.action_dim
        loss, details = self._run(model, batch, draw)
        real_BHA = details["losses"][..., :dims]
        yield Quantity("loss", loss, "loss")
        yield Quantity("loss_per_sample", real_BHA.mean((1, 2)), "loss")
        yield Quantity("loss_per_dim", real_BHA.mean((0, 1)), "loss")
        yield Quantity("velocity", details["velocity"], "output")
        whole = Batch({**batch, "action_mask": torch.ones_like(batch["action_mask"])})
        loss, details = self._run(model, whole, draw)
        yield Quantity("losses_full", details["losses"], "output", "every padded dimension counted, as OpenPI")
        yield Quantity("loss_full_mean", loss, "loss", "every padded dimension counted, as OpenPI")

    def _samples(self, model: Model) -> Iterator[Quantity]:
        batch, _ = self.inputs()
        draw = Draw(noise=self.folder.batch["inference_noise"])
        for name in self.folder.expected:
            if match := re.fullmatch(r"sampled_actions_(\d+)steps", name):
                yield Quantity(name, model.act(self.cut(batch), draw, int(match[1])), "sample")

    def _missing_camera(self, model: Model) -> Iterator[Quantity]:
        """The policy's path without the last camera: images come in [0, 1], the absent one is all -1 and
        masked.
        """
        if "policy_missing_last_cam.loss" not in self.folder.expected:
            return
        batch, draw = self.inputs()
        images = (batch["images"] + 1.0) / 2.0 * 2.0 - 1.0
        images[:, -1] = -1.0
        mask = batch["image_mask"].clone()
        # Officially every camera that is in the batch counts as present, whatever the recorded masks say.
        mask[:, :-1], mask[:, -1] = True, False
        loss, details = self._run(model, Batch({**batch, "images": images, "image_mask": mask}), draw)
        yield Quantity("policy_missing_last_cam.loss", loss, "loss")
        per_sample = details["losses"][..., : self.config.action_dim].mean((1, 2))
        yield Quantity("policy_missing_last_cam.loss_none", per_sample, "loss")

    def _inside(self, model: Model) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        layers = range(self.depth)
        names = ["vision", "projector", "mix", "time", "time.sincos", "action_in", "expert_norm"]
        names += ["layers.0.language.attend:in", "layers.0.expert.attend:in"]
        names += [f"layers.{i}.{half}.mlp" for i in layers for half in ("language", "expert")]
        with torch.no_grad(), Recorder(model, tuple(names)) as seen:
            model(batch, draw)
            joint = {name: values[0] for name, values in seen.items() if values}
            x_BPD, valid_BP = model.embed_prefix(batch)
            prefix_out = model.prefix_out(x_BPD, valid_BP)
            last_mlp = seen[f"layers.{self.depth - 1}.language.mlp"][-1]
        joint[f"layers.{self.depth - 1}.language.mlp"] = last_mlp
        yield from self._vision(joint["vision"], joint["projector"])
        yield Quantity("prefix_embs", x_BPD, inside=True)
        rows = valid_BP[..., None]
        note = "valid rows; padded ones mean nothing"
        yield Quantity("prefix_out", prefix_out, note=note, where=rows, inside=True)
        for i in layers:
            yield Quantity(
                f"vlm_layer{i}_mlp_out", joint[f"layers.{i}.language.mlp"], note=note, where=rows, inside=True
            )
            yield Quantity(f"expert_layer{i}_mlp_out", joint[f"layers.{i}.expert.mlp"], inside=True)
        yield Quantity("x_t", joint["mix"][0], inside=True)
        yield Quantity("time_sincos", joint["time.sincos"], inside=True)
        yield Quantity("adarms_cond", joint["time"], inside=True)
        yield Quantity("suffix_embs", joint["action_in"], inside=True)
        yield Quantity("suffix_out", joint["expert_norm"][0], inside=True)
        yield from self._masks(joint["layers.0.language.attend:in"][3], joint["layers.0.expert.attend:in"][3], valid_BP)

    def _vision(self, tower_MNW: Tensor, features_BVND: Tensor) -> Iterator[Quantity]:
        """All views went through in one call (M = B·V images); the record has them one by one."""
        tower_BVNW = tower_MNW.unflatten(0, (-1, self.views))
        for name, value in (("vision_tower_out", tower_BVNW), ("image_features", features_BVND)):
            for view, part in enumerate(value.unbind(1)):
                yield Quantity(f"{name}.{view}", part, inside=True)

    def _masks(self, prefix: Any, actions: Any, valid_BP: Tensor) -> Iterator[Quantity]:
        """The joint mask, put together from what the two attention calls of a layer were given."""
        b, p = valid_BP.shape
        keys_BS = actions.keys_BS
        h = keys_BS.shape[1] - p
        upper = torch.cat([prefix.dense(p, p).expand(b, 1, p, p), valid_BP.new_zeros(b, 1, p, h)], dim=-1)
        lower = actions.dense(h, p + h).expand(b, 1, h, p + h)
        dense_BSS = torch.cat([upper, lower], dim=2)[:, 0] & keys_BS[:, :, None]
        yield Quantity("att_2d_masks", dense_BSS, "exact", inside=True)
        yield Quantity("prefix_pad_masks", valid_BP, "exact", inside=True)
        # Officially a block starts where this is 1: the prefix is one block, the actions are the next.
        sees_actions_BS = dense_BSS[:, :, -1]
        starts_BS = sees_actions_BS & ~sees_actions_BS.roll(1, dims=1)
        yield Quantity("prefix_att_masks", starts_BS[:, :p], "exact", inside=True)
        yield Quantity("suffix_att_masks", starts_BS[:, p:].float(), "exact", inside=True)
        yield Quantity("position_ids", position_ids(keys_BS), "exact", inside=True)

    def _bfloat16(self) -> Iterator[Quantity]:
        if "bf16_losses_full" not in self.folder.expected:
            return
        model = self.model()
        self.load(model)
        batch, draw = self.inputs()
        batch["action_mask"] = torch.ones_like(batch["action_mask"])
        _, details = self._run(to_bfloat16(model), batch, draw)
        yield Quantity("bf16_losses_full", details["losses"], "bfloat16", "bf16 weights; officially vision stays fp32")
