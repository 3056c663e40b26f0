"""``embodiment_id.json``, ``processor_config.json`` and ``statistics.json``: the files beside an official checkpoint.

What they say about the run's embodiment takes the place of the options of `GrootDataConfig` and of the dataset's own
statistics, so that a policy goes on with the numbers it was trained on.

Facts: NVIDIA/Isaac-GR00T ``processing_gr00t_n1d7.py``, ``state_action_processor.py``; LeRobot 0.6.1
``processor_groot.py``.
"""

from __future__ import annotations

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
ROTATIONS = {"xyz_rot6d": "rot6d", "xyz_rotvec": "axis_angle"}


@dataclass(frozen=True)
class Official:
    """One embodiment in an official checkpoint's folder.

    Args:
        folder: where the files are.
        numbers: embodiment name → number of its weights; empty: the folder does not say.
        processor: ``processor_kwargs`` of ``processor_config.json``.
        modality: its entry of ``modality_configs``: for ``state``, ``action`` and ``video`` the parts, in order.
        statistics: its entry of ``statistics.json``.
        wanted: the run goes on with those statistics, where there are some (`governs`).
    """

    folder: Path
    numbers: Mapping[str, int]
    processor: Mapping[str, Any]
    modality: Mapping[str, Any]
    statistics: Mapping[str, Any]
    wanted: bool = True

    @classmethod
    def of(cls, data: GrootDataConfig) -> Official | None:
        """None without an official folder. UserError for one that is not there, or a file that is not JSON."""
        if not data.official_folder:
            return None
        path = Path(data.official_folder).expanduser()
        if not path.is_dir():
            raise UserError(f"data.official_folder '{data.official_folder}' is not a folder.")
        numbers = {str(name): int(number) for name, number in read_json(path / "embodiment_id.json").items()}
        processor = read_json(path / "processor_config.json").get("processor_kwargs", {})
        modality = processor.get("modality_configs", {}).get(data.embodiment_tag, {})
        statistics = read_json(path / "statistics.json").get(data.embodiment_tag, {})
        return cls(path, numbers, processor, modality, statistics, data.official_statistics)

    @property
    def governs(self) -> bool:
        return self.wanted and bool(self.statistics)

    def parts(self, kind: str) -> tuple[str, ...]:
        return tuple(self.modality.get(kind, {}).get("modality_keys", ()))

    @property
    def relative(self) -> frozenset[str]:
        """The action parts that are relative to the state. Officially ``rep`` delta says that the dataset itself holds
        displacements: they are learned as they are, like absolute actions."""
        if not self.processor.get("use_relative_action"):
            return frozenset()
        reps = {name: _word(config.get("rep")) for name, config in self._action_configs().items()}
        return frozenset(name for name, rep in reps.items() if rep == "relative")

    def deviating(self, kind: str) -> frozenset[str]:
        """The parts that are normalised by mean and deviation, whatever the others are by."""
        return frozenset(self.modality.get(kind, {}).get("mean_std_embedding_keys") or ())

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
        angles = data.sin_cos_embedding_keys
        if "apply_sincos_state_encoding" in given:
            named = self.modality.get("state", {}).get("sin_cos_embedding_keys") or ()
            angles = tuple(named) if given["apply_sincos_state_encoding"] else ()
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
            sin_cos_embedding_keys=angles,
            random_rotation_angle=float(given.get("random_rotation_angle", data.random_rotation_angle) or 0.0),
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
                form = _word(config.get("format")).replace("+", "_")  # by name or by value
                if form not in ROTATIONS:
                    raise UserError(
                        f"'{self.folder}' has relative poses '{name}' of format '{form}': officially too they are "
                        f"xyz_rot6d or xyz_rotvec alone."
                    )
                poses.append(f"{action[name][0]}:{ROTATIONS[form]}")
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
        names = BOUNDS.get(mode, ())
        return {
            column: {name: self._joined(kind, mode, end, dims[kind], horizon) for end, name in enumerate(names)}
            for kind, column in (("state", STATE), ("action", ACTION))
            if self.statistics.get(kind)
        }

    def _joined(self, kind: str, mode: str, end: int, dims: Mapping[str, Sequence[int]], horizon: int) -> np.ndarray:
        """The lower (`end` 0) or upper (1) bound of all parts, or the mean or the deviation."""
        relative = self.relative if kind == "action" else frozenset()
        width = max(d for part in dims.values() for d in part) + 1
        out = np.zeros((horizon, width) if relative else (width,), np.float64)
        for part, place in dims.items():
            source = "relative_action" if part in relative else kind
            if part in self.deviating(kind) and mode != "mean_std":
                # (x - mean) / std is the range from mean - std to mean + std; without a deviation x stays what it is.
                mean, std = (self._values(source, part, name, place) for name in BOUNDS["mean_std"])
                values = np.where(std == 0, 0.0, mean) + (2 * end - 1) * np.where(std == 0, 1.0, std)
            else:
                names = BOUNDS["min_max" if mode == "q99" and part in relative else mode]
                values = self._values(source, part, names[end], place)
            if values.ndim == 2:  # steps behind the last recorded one are not learned
                values = np.concatenate([values, np.repeat(values[-1:], max(0, horizon - len(values)), 0)])[:horizon]
            out[..., list(place)] = values
        return out

    def _values(self, source: str, part: str, name: str, place: Sequence[int]) -> np.ndarray:
        values = np.asarray(self.statistics.get(source, {}).get(part, {}).get(name, ()), np.float64)
        if not values.size or values.shape[-1] != len(place):
            raise UserError(
                f"'{self.folder}/statistics.json' has {values.shape[-1] if values.size else 'no'} values for {name} "
                f"of {source} part '{part}', but it has {len(place)} dimensions: set "
                f"data.official_statistics=false to normalise by the dataset."
            )
        return values


def resolve(
    data: GrootDataConfig, frame: tuple[int, int], horizon: int, info: Described
) -> tuple[GrootDataConfig, Stats | None]:
    """The options of a run on `info`'s dataset, and the statistics that it normalises by (None: the dataset's own)."""
    official = Official.of(data)
    if official is None:
        return data, None
    data = official.options(data, frame)
    if not official.governs:
        return data, None
    dims = {kind: places(kind, info, data, official) for kind in ("state", "action")}
    data = official.relative_options(data, dims)
    return data, official.normal_statistics(data.normalization_mode, dims, horizon)


def places(
    kind: str, info: Described, data: GrootDataConfig, official: Official | None = None
) -> Mapping[str, Sequence[int]]:
    """The parts of ``state`` or ``action`` in the model's order, with their dimensions in the dataset: as
    ``meta/modality.json`` says, else one behind the other as in the official statistics, else one part of that name."""
    modality = Modality.of(info, data) if data.use_modality else None
    most = info.action_dim if kind == "action" else info.state_dim
    used = official if official and official.governs else None
    names = (official.parts(kind) if official else ()) or (tuple(used.statistics.get(kind, {})) if used else ())
    if modality and modality.groups[kind]:
        return modality.named(kind, names)
    if used is None:
        return {kind: range(most)}
    found, start = {}, 0
    for name in names:
        width = np.shape(used.statistics.get(kind, {}).get(name, {}).get("min", ()))[-1:]
        found[name] = range(start, start := start + (width[0] if width else 0))
    if start != most:
        raise UserError(
            f"'{used.folder}/statistics.json' has {start} {kind} dimensions for '{data.embodiment_tag}', and the "
            f"dataset has {most}: choose another data.embodiment_tag, or set data.official_statistics=false."
        )
    return found


def _word(value: Any) -> str:
    """An enumeration's value as official files write it: ``"ActionRepresentation.RELATIVE"``, ``"relative"``, ..."""
    return str(value.get("value", "") if isinstance(value, Mapping) else value).lower().rpartition(".")[2]
