"""The files beside GR00T's weights and datasets: embodiment numbers, processor settings, ``meta/modality.json``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlaforge.data.errors import UserError
from vlaforge.data.schema import IMAGES
from vlaforge.models.groot.config import GrootDataConfig


def from_official(config: GrootDataConfig, image_size: int) -> tuple[GrootDataConfig, dict[str, int]]:
    """The options with those of `official_folder` in their place, and its embodiment numbers (empty: it has none).

    Raises UserError for a folder that is not there, another image size, or the Albumentations image path.
    """
    if not config.official_folder:
        return config, {}
    folder = Path(config.official_folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.official_folder '{config.official_folder}' is not a folder.")
    numbers = {str(tag): int(number) for tag, number in _json(folder / "embodiment_id.json").items()}
    given = _json(folder / "processor_config.json").get("processor_kwargs", {})
    if given.get("use_albumentations"):
        raise UserError(
            f"'{folder}' was trained with Albumentations' image path (shortest edge, area interpolation), which is not "
            f"built here: leave out data.official_folder and set data.shortest_image_edge and data.crop_fraction."
        )
    target = given.get("image_target_size")
    if target and tuple(target) != (image_size, image_size):
        raise UserError(f"'{folder}' has images of {target}: set model.image_size and data.image_size to {target[0]}.")
    crop, crop_size = given.get("crop_fraction"), given.get("image_crop_size")
    if crop is None and crop_size and target:
        crop = crop_size[0] / target[0]
    settings = {
        "shortest_image_edge": given.get("shortest_image_edge"),
        "crop_fraction": crop,
        "letter_box": bool(given.get("letter_box_transform", False)),
        "formalize_language": bool(given.get("formalize_language", True)),
        "clip": bool(given.get("clip_outliers", True)),
    }
    return (replace(config, **settings) if given else config), numbers


def modality_cameras(dataset: Path, cameras: Collection[str]) -> list[str]:
    """Those of the dataset's `cameras` that its ``meta/modality.json`` names, in that order; empty without one."""
    videos: Mapping[str, Any] = _json(dataset / "meta" / "modality.json").get("video", {})
    keys = [str(entry.get("original_key", f"{IMAGES}{name}")) for name, entry in videos.items()]
    return [key.removeprefix(IMAGES) for key in keys if key.removeprefix(IMAGES) in cameras]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"'{path}' is not valid JSON: {error}.") from None
