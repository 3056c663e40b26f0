"""Wan's VAE 2.2 against the official code's recorded latents and pixels: ``forge-parity --model wan_vae22``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.convert import Account
from vlaforge.models.golden import Base, Folder, Quantity
from vlaforge.models.video.frozen import EncoderModel
from vlaforge.models.video.names import vae22_layouts
from vlaforge.models.video.vae import MEAN_22, STD_22, VaeConfig, WanVae


class Golden(Base):
    layouts = vae22_layouts()

    def __init__(self, folder: Folder):
        super().__init__(folder)
        raw = folder.config["diffusers_config"]
        self.config = VaeConfig(
            path=str(folder.path / "weights.safetensors"),
            dtype="float32",
            base_dim=raw["base_dim"],
            decoder_base_dim=raw["decoder_base_dim"],
            z_dim=raw["z_dim"],
            dim_mult=tuple(raw["dim_mult"]),
            num_res_blocks=raw["num_res_blocks"],
            temporal_downsample=tuple(raw["temperal_downsample"]),
            in_channels=raw["in_channels"],
            patch_size=raw["patch_size"],
        )

    def model(self) -> EncoderModel:
        levels = range(len(self.config.dim_mult))
        resnets = [
            f"net.{side}.{level}_blocks.{i}.resnets.{j}"
            for side, level, count in (("encoder", "down", 0), ("decoder", "up", 1))
            for i in levels
            for j in range(self.config.num_res_blocks + count)
        ]
        return EncoderModel("wan_vae22", WanVae(self.config), {"resnets": tuple(resnets)})

    def inputs(self) -> tuple[Batch, Draw]:
        return Batch(video=self.folder.batch["video"]), Draw()

    def quantities(self, plain: EncoderModel, lowered: EncoderModel) -> Iterator[Quantity]:
        vae, video = lowered.encoder, self.folder.batch["video"]
        latents = vae.encode(video)
        yield Quantity("latents_normalized", latents)
        yield Quantity("latents_first_frame_only", vae.encode(video[:, :, :1]))
        yield Quantity("decoded", vae.decode(self.folder.expected["latents_normalized"]))
        other = replace(self.config, path=str(self.folder.path / "weights_diffusers.safetensors"))
        yield Quantity("diffusers.latents_normalized", WanVae(other).encode(video), note="weights in diffusers' names")
        recorded = [torch.tensor(self.folder.config[name]) for name in ("latents_mean", "latents_std")]
        for name, ours, theirs in zip(("mean", "std"), (MEAN_22, STD_22), recorded):
            if not torch.equal(torch.tensor(ours), theirs):
                raise AssertionError(f"the published latent {name} differs from the folder's")

    def load(self, model: nn.Module) -> Account:
        return model.encoder.account
