"""GR00T N1.6's recorded results (a port of NVIDIA's code, keys as NVIDIA's) in our terms, for `forge-parity`.

Officially tokens run through the vision tower sorted into windows; ours stand in merge order, and are sorted here to
compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vlaforge.data.schema import Batch
from vlaforge.models.golden import Folder, Quantity
from vlaforge.models.groot.golden import INSIDE, GrootGolden, head_settings, pack, text_config, unpack
from vlaforge.models.groot_n1_6.config import ModelConfig
from vlaforge.models.groot_n1_6.convert import LAYOUTS
from vlaforge.models.groot_n1_6.model import Model
from vlaforge.models.towers.qwen3_vision import PatchGrid
from vlaforge.models.towers.siglip2 import Siglip2Config


class Golden(GrootGolden):
    layouts = LAYOUTS
    padding_means_nothing = True

    def __init__(self, folder: Folder):
        super().__init__(folder)
        layers = (f"vision.layers.{i}" for i in range(self.config.vision.layers))
        self.vision_names = ("vision.layers.0:in", "vision.post_norm", "projector", *layers)

    def model_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        vision = raw["vision"]
        tower = Siglip2Config(
            width=vision["hidden_size"], layers=vision["num_hidden_layers"], heads=vision["num_attention_heads"],
            mlp=vision["intermediate_size"], patch=vision["patch_size"], table=round(vision["num_patches"] ** 0.5),
            window=vision["window_size"], full_layers=tuple(vision["full_attention_indexes"]),
            rope=vision["use_rope"], windows=vision["use_windows_attn"],
        )  # fmt: skip
        return ModelConfig(vision=tower, text=text_config(raw), **head_settings(raw))

    def model(self) -> Model:
        return Model(self.config).eval()

    def views(self, model: Model) -> tuple[Tensor, Tensor]:
        names = sorted(name for name in self.folder.batch if name.startswith("pixel_values"))
        images = [self.folder.batch[name] for name in names]
        patch, samples = self.config.vision.patch, self.folder.batch["input_ids"].shape[0]
        sizes = [[image.shape[2] // patch, image.shape[3] // patch] for image in images]
        patches = [model.vision.patchify(image)[0] for image in images]
        return pack(patches, samples), torch.tensor(sizes).unflatten(0, (samples, -1))

    def vision(self, model: Model, batch: Batch, seen: Mapping[str, Any]) -> Iterator[Quantity]:
        grid = PatchGrid.of(batch["grids"].flatten(0, 1), batch["patches"].shape[2], self.config.vision.merge)
        raster, windowed = self._orders(grid)

        def rows(value_MND: Tensor, order: Tensor) -> Tensor:
            return unpack(value_MND, grid.valid_MN)[order][None]

        yield Quantity("vision_embeddings_windowed", rows(seen["vision.layers.0:in"][0][0], windowed), note=INSIDE)
        for i in range(self.config.vision.layers):
            value = rows(seen[f"vision.layers.{i}"][0], windowed)
            yield Quantity(f"vision_layer{i}_out_windowed", value, note=INSIDE)
        normed = seen["vision.post_norm"][0]
        yield Quantity("vision_post_ln_windowed", rows(normed, windowed), note=INSIDE)
        yield Quantity("vision_last_hidden_raster", rows(normed, raster), note=INSIDE)
        tokens = unpack(seen["projector"][0], grid.valid_MN[:, :: self.config.vision.merge**2])
        yield Quantity("mlp1_out_image_tokens", tokens[None], note=INSIDE)

    def _orders(self, grid: PatchGrid) -> tuple[Tensor, Tensor]:
        """Row by row, and window by window (each row by row), for the valid patches of all images."""
        image = torch.arange(grid.rows_MN.shape[0])[:, None].expand_as(grid.rows_MN)
        side, big = self.config.vision.window, 4096
        rows, columns = grid.rows_MN, grid.columns_MN
        raster = (image * big + rows) * big + columns
        window = (((image * big + rows // side) * big + columns // side) * big + rows % side) * big + columns % side
        return torch.argsort(raster[grid.valid_MN]), torch.argsort(window[grid.valid_MN])
