"""Recorded results of GR00T's official implementations in our terms: what N1.6 and N1.7 have in common.

Axes: B samples, V views, N patches, L tokens, H action steps, A action dimensions.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.action.dit import ContextConfig, DiTConfig
from vlaforge.models.action.flow import squares
from vlaforge.models.golden import Base, Folder, Quantity, Recorder
from vlaforge.models.groot.policy import GrootPolicy, Overlap
from vlaforge.models.towers.qwen3 import Qwen3Config

INSIDE = "before lowering"


def text_config(raw: Mapping[str, Any]) -> Qwen3Config:
    """The language model of `config.json`, cut to the kept layers."""
    text = raw["text"]
    section = text.get("mrope_section")
    return Qwen3Config(
        vocab_size=raw["vocab"], width=text["hidden_size"], layers=raw["select_layer"],
        heads=text["num_attention_heads"], kv_heads=text["num_key_value_heads"], head_dim=text["head_dim"],
        mlp=text["intermediate_size"], theta=text["rope_theta"], mrope=None if section is None else tuple(section),
    )  # fmt: skip


def head_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `GrootConfig` needs of `config.json`; everything is trained, as when the gradients were recorded."""
    dit, context = raw["dit"], raw.get("vlsa")
    alternate = next((part["use_alternate_vl_dit"] for key, part in raw.items() if key.endswith("_config")
                      and isinstance(part, dict) and "use_alternate_vl_dit" in part), True)  # fmt: skip
    return {
        "image_token": raw["img_tok"], "select_layer": raw["select_layer"], "max_state_dim": raw["max_state"],
        "max_action_dim": raw["max_action"], "action_horizon": raw["horizon"], "hidden_size": raw["hidden"],
        "max_num_embodiments": raw["num_emb"], "max_seq_len": raw["max_seq"],
        "state_history_length": raw.get("hist", 1),
        "dit": DiTConfig(
            layers=dit["num_layers"], heads=dit["num_attention_heads"], head_dim=dit["attention_head_dim"],
            output=dit["output_dim"], context=raw["text"]["hidden_size"],
            text_every=raw["every"] if alternate else None,
        ),
        "vl_self_attention": None if context is None else ContextConfig(
            context["num_layers"], context["num_attention_heads"], context["attention_head_dim"]
        ),
        "tune_llm": True, "tune_visual": True,
    }  # fmt: skip


class GrootGolden(Base):
    adamw = {"lr": 1e-3, "betas": (0.95, 0.999), "eps": 1e-8, "weight_decay": 1e-5}
    padding_means_nothing = False
    """Whether rows of padded tokens are compared: where padding leaks into real tokens it must be right, too."""

    def __init__(self, folder: Folder):
        super().__init__(folder)
        self.config = self.model_config(folder.config)

    @abstractmethod
    def model_config(self, raw: Mapping[str, Any]) -> Any:
        """The hyperparameters of `config.json`."""

    @abstractmethod
    def views(self, model: GrootPolicy) -> tuple[Tensor, Tensor]:
        """The recorded images as `patches` [B, V, N, values] and `grids` [B, V, 2]."""

    @abstractmethod
    def vision(self, model: GrootPolicy, batch: Batch, seen: Mapping[str, Any]) -> Iterator[Quantity]:
        """The vision tower's quantities, from its recorded submodules (`vision_names`)."""

    vision_names: tuple[str, ...] = ()

    def inputs(self) -> tuple[Batch, Draw]:
        raw = self.folder.batch
        patches, grids = self.views(self._patcher())
        batch = Batch(
            patches=patches, grids=grids, tokens=raw["input_ids"], token_mask=raw["attention_mask"].bool(),
            state=raw["state"].flatten(1), embodiment=raw["embodiment_id"], actions=raw["action"],
            action_mask=raw["action_mask"].bool(),
        )  # fmt: skip
        return batch, Draw(noise=raw["noise"], time=raw["time"])

    def _patcher(self) -> GrootPolicy:
        if not hasattr(self, "_meta"):
            with torch.device("meta"):
                self._meta = self.model()
        return self._meta

    def quantities(self, plain: GrootPolicy, lowered: GrootPolicy) -> Iterator[Quantity]:
        yield from self._losses(lowered)
        yield from self._samples(lowered)
        yield from self._inside(plain)

    def _losses(self, model: GrootPolicy) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        with torch.no_grad():
            losses = model(self.cut(batch), draw)
        yield Quantity("loss", losses.total(), "loss")
        velocity, target = losses.details["velocity"], losses.details["target"]
        yield Quantity("action_loss", squares(velocity, target, batch["action_mask"]), "output")
        yield Quantity("pred_velocity", velocity, "output")
        if "unpadded_single_sample.index" in self.folder.expected:
            row = self.folder.expected["unpadded_single_sample.index"]
            yield Quantity("unpadded_single_sample.index", row, "exact", "given: which sample has no padding")
            alone = slice(int(row), int(row) + 1)
            one, its = Batch(batch.map(lambda t: t[alone])), Draw(draw.map(lambda t: t[alone]))
            with torch.no_grad():
                yield Quantity("unpadded_single_sample.loss", model(self.cut(one), its).total(), "loss")

    def _samples(self, model: GrootPolicy) -> Iterator[Quantity]:
        batch, _ = self.inputs()
        draw = Draw(noise=self.folder.batch["inference_noise"])
        for name in self.folder.expected:
            if match := re.fullmatch(r"sampled_actions_(\d+)steps", name):
                yield Quantity(name, model.act(self.cut(batch), draw, int(match[1])), "sample")
            elif match := re.fullmatch(r"sampled_actions_rtc_overlap(\d+)_frozen(\d+)_ramp(\d+)", name):
                steps, frozen, ramp = map(int, match.groups())
                overlap = Overlap(batch["actions"][:, -steps:], steps, frozen, float(ramp))
                sampled = model.act(self.cut(batch), draw, self.folder.config["steps"], overlap)
                yield Quantity(name, sampled, "sample")

    def _inside(self, model: GrootPolicy) -> Iterator[Quantity]:
        batch, draw = self.inputs()
        config, contexts = self.config, len(model.head.context_blocks)
        blocks = [f"head.dit.blocks.{i}" for i in range(config.dit.layers)]
        layers = [f"language.layers.{i}" for i in range(config.text.layers)]
        names = [*self.vision_names, *layers, *blocks, "head.norm_context", "head.state_encoder"]
        names += ["head.action_encoder", "head.dit.time_fc2", "head.dit"]
        names += [f"head.context_blocks.{contexts - 1}"] if contexts else []
        with torch.no_grad(), Recorder(model, tuple(names)) as seen:
            model(batch, draw)
            features, image_BL, _ = model.features(batch)
            first = {name: values[0] for name, values in seen.items()}
            decoded = model.head.action_decoder(first["head.dit"], batch["embodiment"])
        where = batch["token_mask"][..., None] if self.padding_means_nothing else None
        note = f"{INSIDE}; valid rows" if self.padding_means_nothing else INSIDE
        yield from self.vision(model, batch, seen)
        for i, name in enumerate(layers):
            yield Quantity(f"llm_layer{i}_out", first[name], note=note, where=where)
        yield Quantity("backbone_features", features, note=note, where=where)
        yield Quantity("vlln_out", first["head.norm_context"], note=note, where=where)
        if contexts:
            last = first[f"head.context_blocks.{contexts - 1}"]
            yield Quantity("vl_self_attention_out", last, note=note, where=where)
        yield Quantity("image_mask", image_BL, "exact", INSIDE)
        yield Quantity("backbone_attention_mask", batch["token_mask"], "exact", INSIDE)
        yield Quantity("t_discretized", model.bucket(draw["time"]).long(), "exact", INSIDE)
        yield Quantity("state_features", first["head.state_encoder"], note=INSIDE)
        yield Quantity("action_encoder_out", first["head.action_encoder"], note=INSIDE)
        yield Quantity("dit_temb", first["head.dit.time_fc2"], note=INSIDE)
        for i, name in enumerate(blocks):
            yield Quantity(f"dit_block{i}_out", first[name], note=INSIDE)
        yield Quantity("dit_out", first["head.dit"], note=INSIDE)
        yield Quantity("action_decoder_out", decoded, note=f"{INSIDE}; training decodes the action tokens alone")


def pack(images: list[Tensor], samples: int) -> Tensor:
    """Patches of each image [n, values], in order of sample and view → [B, V, N, values], padded to the largest."""
    most = max(len(image) for image in images)
    padded = [torch.nn.functional.pad(image, (0, 0, 0, most - len(image))) for image in images]
    return torch.stack(padded).unflatten(0, (samples, -1))


def unpack(rows_MND: Tensor, valid_MN: Tensor) -> Tensor:
    """[M, N, D] → the valid rows of all images in one sequence."""
    return rows_MND[valid_MN]
