"""The official GR00T N1.7's recorded results (LeRobot 0.6.1, keys as NVIDIA's) in our terms, for `forge-parity`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vlaforge.data.schema import Batch, Draw
from vlaforge.models.golden import Folder, Quantity
from vlaforge.models.groot.golden import INSIDE, GrootGolden, head_settings, pack, text_config, unpack
from vlaforge.models.groot_n1_7.config import ModelConfig
from vlaforge.models.groot_n1_7.convert import LAYOUTS
from vlaforge.models.groot_n1_7.model import Model
from vlaforge.models.groot_n1_7.positions import multimodal_positions
from vlaforge.models.towers.qwen3_vision import PatchGrid, Qwen3VisionConfig


class Golden(GrootGolden):
    layouts = LAYOUTS

    def __init__(self, folder: Folder):
        super().__init__(folder)
        depth, taps = self.config.vision.layers, len(self.config.vision.deepstack)
        self.vision_names = (
            "vision.patch_embed", "vision.merger", *(f"vision.blocks.{i}" for i in range(depth)),
            *(f"vision.deepstack_mergers.{i}" for i in range(taps)),
        )  # fmt: skip

    def model_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        vision = raw["vision"]
        tower = Qwen3VisionConfig(
            width=vision["hidden_size"], layers=vision["depth"], heads=vision["num_heads"],
            mlp=vision["intermediate_size"], patch=vision["patch_size"], frames=vision["temporal_patch_size"],
            merge=vision["spatial_merge_size"], table=round(vision["num_position_embeddings"] ** 0.5),
            deepstack=tuple(vision["deepstack_visual_indexes"]), output=vision["out_hidden_size"],
        )  # fmt: skip
        return ModelConfig(
            vision=tower, text=text_config(raw), vision_start_token=raw["vs"], vision_end_token=raw["ve"],
            **head_settings(raw),
        )  # fmt: skip

    def model(self) -> Model:
        return Model(self.config).eval()

    def _sizes(self) -> Tensor:
        return self.folder.batch["image_grid_thw"][:, 1:]

    def views(self, model: Model) -> tuple[Tensor, Tensor]:
        sizes_M2 = self._sizes()
        images = list(self.folder.batch["pixel_values"].split(sizes_M2.prod(1).tolist()))
        samples = self.folder.batch["input_ids"].shape[0]
        return pack(images, samples), sizes_M2.unflatten(0, (samples, -1))

    def inputs(self) -> tuple[Batch, Draw]:
        batch, draw = super().inputs()
        rows = zip(batch["tokens"], batch["token_mask"], batch["grids"])
        batch["positions"] = torch.stack([
            torch.from_numpy(multimodal_positions(tokens.numpy(), mask.numpy(), grids.tolist(), self.config))
            for tokens, mask, grids in rows
        ])  # fmt: skip
        return batch, draw

    def vision(self, model: Model, batch: Batch, seen: Mapping[str, Any]) -> Iterator[Quantity]:
        grid = PatchGrid.of(batch["grids"].flatten(0, 1), batch["patches"].shape[2], self.config.vision.merge)
        merged_MN = grid.valid_MN[:, :: self.config.vision.merge**2]
        yield Quantity("vision_patch_embed", unpack(seen["vision.patch_embed"][0], grid.valid_MN), note=INSIDE)
        for i in range(self.config.vision.layers):
            yield Quantity(f"vision_block{i}_out", unpack(seen[f"vision.blocks.{i}"][0], grid.valid_MN), note=INSIDE)
        yield Quantity("vision_merger_out", unpack(seen["vision.merger"][0], merged_MN), note=INSIDE)
        for i in range(len(self.config.vision.deepstack)):
            tapped = unpack(seen[f"vision.deepstack_mergers.{i}"][0], merged_MN)
            yield Quantity(f"deepstack{i}_out", tapped, note=INSIDE)
        positions_3BL = batch["positions"].permute(1, 0, 2)
        rows_4BL = torch.cat([positions_3BL[:1], positions_3BL])
        yield Quantity("mrope_position_ids", rows_4BL, "exact", "as the data side makes them")
