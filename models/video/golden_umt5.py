"""UMT5 against the official Wan text encoder's recorded outputs: ``forge-parity --model umt5``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.convert import Account
from vlaforge.models.golden import Base, Folder, Quantity
from vlaforge.models.video.frozen import EncoderModel
from vlaforge.models.video.names import UMT5_LAYOUTS
from vlaforge.models.video.text import Umt5, Umt5Config


class Golden(Base):
    layouts = UMT5_LAYOUTS

    def __init__(self, folder: Folder):
        super().__init__(folder)
        raw = folder.config
        self.config = Umt5Config(
            path=str(folder.path / "weights.safetensors"),
            dtype="float32",
            vocab=raw["vocab"],
            dim=raw["dim"],
            attention_dim=raw["dim_attn"],
            ffn_dim=raw["dim_ffn"],
            heads=raw["num_heads"],
            layers=raw["num_layers"],
            buckets=raw["num_buckets"],
        )

    def model(self) -> EncoderModel:
        blocks = tuple(f"net.encoder.block.{i}" for i in range(self.config.layers))
        return EncoderModel("umt5", Umt5(self.config), {"encoder.block": blocks})

    def inputs(self) -> tuple[Batch, Draw]:
        return Batch(ids=self.folder.batch["ids"].long(), mask=self.folder.batch["mask"].bool()), Draw()

    def quantities(self, plain: EncoderModel, lowered: EncoderModel) -> Iterator[Quantity]:
        ids, mask = self.inputs()[0].values()
        ours = lowered.encoder.encode(ids, mask)
        yield Quantity("output_zero_padded", ours)
        yield Quantity("output", ours, note="rows of real tokens; padded ones mean nothing", where=mask[..., None])
        other = Umt5(replace(self.config, path=str(self.folder.path / "weights_hf.safetensors")))
        if not torch.equal(other.encode(ids, mask), Umt5(self.config).encode(ids, mask)):
            raise AssertionError("the weights in transformers' names give other outputs than the official file")

    def load(self, model: nn.Module) -> Account:
        return model.encoder.account
