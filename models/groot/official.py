"""``embodiment_id.json``, ``processor_config.json`` and ``statistics.json``: the files beside an official checkpoint.

What they say about the run's embodiment takes the place of the options of `GrootDataConfig` and of the dataset's own
statistics, so that a policy goes on with the numbers it was trained on.

Facts: NVIDIA/Isaac-GR00T ``processing_gr00t_n1d7.py``, ``state_action_processor.py``; LeRobot 0.6.1
``processor_groot.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.schema import ACTION, STATE
from vlaforge.models.groot.config import GrootDataConfig
from vlaforge.models.groot.modality import Described, Modality, read_json

Stats = dict[str, dict[str, np.ndarray]]
BOUNDS = {"q99": ("q01", "q99"), "min_max": ("min", "max"), "mean_std": ("mean", "std")}
ROTATIONS = {"xyz+rot6d": "rot6d", "xyz+rotvec": "axis_angle"}


@dataclass(frozen=True)
class Official:
    """One embodiment in an official checkpoint's folder.

    Args:
        folder: where the files are.
        numbers: embodiment name → number of its weights; empty: the folder does not say.
        processor: ``processor_kwargs`` of ``processor_config.json``.
        modality: its entry of ``modality_configs``: for ``state``, ``action`` and ``video`` the parts, in order.
        statistics: its entry of ``statistics.json``.
    """

    folder: Path
    numbers: Mapping[str, int]
    processor: Mapping[str, Any]
    modality: Mapping[str, Any]
    statistics: Mapping[str, Any]

    @classmethod
    def read(cls, folder: str, tag: str) -> Official:
        """UserError for a folder that is not there, or a file that is not JSON."""
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise UserError(f"data.official_folder '{folder}' is not a folder.")
        numbers = {str(name): int(number) for name, number in read_json(path / "embodiment_id.json").items()}
        processor = read_json(path / "processor_config.json").get("processor_kwargs", {})
        modality = processor.get("modality_configs", {}).get(tag, {})
        return cls(path, numbers, processor, modality, read_json(path / "statistics.json").get(tag, {}))

    def parts(self, kind: str) -> tuple[str, ...]:
        return tuple(self.modality.get(kind, {}).get("modality_keys", ()))

    @property
    def relative(self) -> frozenset[str]:
        """The action parts that are relative to the state."""
        if not self.processor.get("use_relative_action"):
            return frozenset()
        reps = {name: _word(config.get("rep")) for name, config in self._action_configs().items()}
        if "delta" in reps.values():
            raise UserError(
                f"'{self.folder}' has actions as steps since the one before (rep delta), which are not built."
            )
        return frozenset(name for name, rep in reps.items() if rep == "relative")

    def _action_configs(self) -> dict[str, Mapping[str, Any]]:
        configs = self.modality.get("action", {}).get("action_configs") or ()
        return {name: config or {} for name, config in zip(self.parts("action"), configs)}

    # ------------------------------------------------------------------------------------------------ options

    def options(self, data: GrootDataConfig, frame: tuple[int, int]) -> GrootDataConfig:
        """`data` with what ``processor_config.json`` says. UserError for what is not built, or another image size."""
        given = self.processor
        if not given:
            return data
        areas = bool(given.get("use_albumentations", False))
        edge, crop, crop_size = (given.get(n) for n in ("shortest_image_edge", "crop_fraction", "image_crop_size"))
        target = given.get("image_target_size")
        if target and not areas and tuple(target) != frame:
            raise UserError(
                f"'{self.folder}' has images of {target[0]} × {target[1]}: set model.image_size={target[0]} "
                f"model.image_width={target[1]} data.image_size={target[0]}."
            )
        if crop is None and crop_size and target:
            crop = crop_size[0] / target[0]
        if given.get("random_rotation_angle"):
            warnings.warn("Random rotation of the official processor is left out of the augmentation.", stacklevel=2)
        if given.get("apply_sincos_state_encoding") and self.modality.get("state", {}).get("sin_cos_embedding_keys"):
            raise UserError(f"'{self.folder}' encodes states as sine and cosine, which is not built.")
        colours = given.get("color_jitter_params", data.color_jitter)
        if colours is None or isinstance(colours, Mapping):
            names = ("brightness", "contrast", "saturation", "hue")
            colours = tuple(float((colours or {}).get(name, 0.0)) for name in names)
        steps = self.modality.get("action", {}).get("delta_indices") or ()
        return replace(
            data,
            image_path="albumentations" if areas else "torch",
            shortest_image_edge=edge or (target[0] if target and areas else None),
            crop_fraction=crop,
            letter_box=bool(given.get("letter_box_transform", False)),
            formalize_language=bool(given.get("formalize_language", True)),
            clip=bool(given.get("clip_outliers", True)),
            color_jitter=colours,
            action_steps=data.action_steps or len(steps) or None,
            normalization_mode=self._mode(data.normalization_mode) if self.statistics else data.normalization_mode,
        )

    def _mode(self, default: str) -> str:
        if self.processor.get("use_mean_std"):
            return "mean_std"
        if "use_percentiles" in self.processor:
            return "q99" if self.processor["use_percentiles"] else "min_max"
        return default

    def relative_options(
        self, data: GrootDataConfig, dims: Mapping[str, Mapping[str, Sequence[int]]]
    ) -> GrootDataConfig:
        """`data` with the relative actions of the checkpoint. `dims[kind]`: part → dimensions of the dataset."""
        relative = self.relative
        if not relative:
            return data
        action, state = dims["action"], dims["state"]
        refers, poses, keep = {}, [], []
        for name, config in self._action_configs().items():
            if name not in relative:
                keep += action[name]
            elif _word(config.get("type")) == "eef":
                rotation = ROTATIONS.get(_word(config.get("format")), "rot6d")
                poses.append(f"{action[name][0]}:{rotation}")
            source = state.get(config.get("state_key") or name, ())
            refers |= dict(zip(action[name], source)) if name in relative else {}
        whole = sorted(d for part in action.values() for d in part)
        return replace(
            data, action_mode="relative", action_keep=tuple(sorted(keep)), action_poses=tuple(poses),
            action_state_dims=tuple(refers.get(d, 0) for d in whole),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ statistics

    def normal_statistics(self, mode: str, dims: Mapping[str, Mapping[str, Sequence[int]]], horizon: int) -> Stats:
        """Statistics in the dataset's order, [A], or [horizon, A] with relative actions (whose bounds are the range of
        each step). UserError when they have other dimensions than the dataset."""
        return {
            column: {
                name: self._joined(kind, name, bound, dims[kind], horizon)
                for name, bound in zip(BOUNDS.get(mode, ()), BOUNDS["min_max" if mode == "q99" else mode])
            }
            for kind, column in (("state", STATE), ("action", ACTION))
            if self.statistics.get(kind)
        }

    def _joined(self, kind: str, name: str, bound: str, dims: Mapping[str, Sequence[int]], horizon: int) -> np.ndarray:
        relative = self.relative if kind == "action" else frozenset()
        width = max(d for part in dims.values() for d in part) + 1
        out = np.zeros((horizon, width) if relative else (width,), np.float64)
        for part, place in dims.items():
            source, key = ("relative_action", bound) if part in relative else (kind, name)
            values = np.asarray(self.statistics.get(source, {}).get(part, {}).get(key, ()), np.float64)
            if not values.size or values.shape[-1] != len(place):
                raise UserError(
                    f"'{self.folder}/statistics.json' has {values.shape[-1] if values.size else 'no'} values for {key} "
                    f"of {source} part '{part}', but it has {len(place)} dimensions: set "
                    f"data.official_statistics=false to normalise by the dataset."
                )
            if values.ndim == 2:  # steps behind the last recorded one are not learned
                values = np.concatenate([values, np.repeat(values[-1:], max(0, horizon - len(values)), 0)])[:horizon]
            out[..., list(place)] = values
        return out


def resolve(
    data: GrootDataConfig, frame: tuple[int, int], horizon: int, info: Described
) -> tuple[GrootDataConfig, Stats | None]:
    """The options of a run on `info`'s dataset, and the statistics that it normalises by (None: the dataset's own)."""
    if not data.official_folder:
        return data, None
    official = Official.read(data.official_folder, data.embodiment_tag)
    data = official.options(data, frame)
    if not (official.statistics and data.official_statistics):
        return data, None
    dims = {kind: _dims(official, kind, info, data) for kind in ("state", "action")}
    data = official.relative_options(data, dims)
    return data, official.normal_statistics(data.normalization_mode, dims, horizon)


def _dims(official: Official, kind: str, info: Described, data: GrootDataConfig) -> dict[str, Sequence[int]]:
    """Each part's dimensions in the dataset: as ``meta/modality.json`` says, else one behind the other."""
    groups = Modality.of(info, data).groups[kind] if data.use_modality else {}
    parts = official.parts(kind) or tuple(official.statistics.get(kind, {}))
    if groups:
        return {name: groups[name] for name in parts if name in groups}
    found, start = {}, 0
    for name in parts:
        width = np.shape(official.statistics.get(kind, {}).get(name, {}).get("min", ()))[-1:]
        found[name] = range(start, start := start + (width[0] if width else 0))
    most = info.action_dim if kind == "action" else info.state_dim
    if start != most:
        raise UserError(
            f"'{official.folder}/statistics.json' has {start} {kind} dimensions for '{data.embodiment_tag}', and the "
            f"dataset has {most}: choose another data.embodiment_tag, or set data.official_statistics=false."
        )
    return found


def _word(value: Any) -> str:
    """An enumeration's value as official files write it: ``"ActionRepresentation.RELATIVE"``, ``"relative"``, ..."""
    return str(value.get("value", "") if isinstance(value, Mapping) else value).lower().rpartition(".")[2]
