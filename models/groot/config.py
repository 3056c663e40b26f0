"""How data becomes GR00T's input: the options that N1.6 and N1.7 share."""

from __future__ import annotations

from dataclasses import dataclass

from vlaforge.data import schema
from vlaforge.data.errors import UserError, unknown
from vlaforge.models.groot.images import PATHS


@dataclass(frozen=True)
class GrootDataConfig(schema.DataConfig):
    """Args:
    embodiment_tag: the robot, which chooses the weights around the action head; a name of the family's table (or of the
        official folder's), or a number.
    official_folder: folder of an official checkpoint. Its ``embodiment_id.json`` and ``processor_config.json`` replace
        the family's table and the options below that say so; its ``statistics.json``, where it has `embodiment_tag`,
        takes the place of the dataset's (and decides `normalization_mode` and relative actions).
    official_statistics: read that ``statistics.json``.
    use_modality: read the dataset's ``meta/modality.json``: order of cameras, and of the parts of state and action.
    formalize_language: lower-case the task and leave out punctuation (processor_config wins).
    image_path: ``torch`` or ``albumentations``, see `images.ImageTransform` (processor_config wins).
    letter_box: pad a frame to a square before anything else (processor_config wins).
    shortest_image_edge: side that a frame is resized to before the crop; None: the model's image size (processor_config
        wins).
    crop_fraction: side of the centre crop, before the last resize; None: no crop (processor_config wins).
    image_augment: in training, a random crop instead of the centre one, and `color_jitter`; the same for all views of a
        sample, drawn from its own generator.
    color_jitter: widths of brightness, contrast, saturation and hue (processor_config wins).
    clip: normalised states and actions are clamped to [-1, 1].
    action_steps: steps that are learned of the model's horizon; None: all.
    pad_steps: ``mask`` leaves steps beyond the episode's end out of the loss, ``train`` counts them.
    """

    embodiment_tag: str = "new_embodiment"
    official_folder: str = ""
    official_statistics: bool = True
    use_modality: bool = True
    formalize_language: bool = True
    image_path: str = "torch"
    letter_box: bool = False
    shortest_image_edge: int | None = None
    crop_fraction: float | None = None
    image_augment: bool = False
    color_jitter: tuple[float, ...] = (0.3, 0.4, 0.5, 0.08)
    clip: bool = True
    action_steps: int | None = None
    pad_steps: str = "mask"

    def __post_init__(self) -> None:
        if self.pad_steps not in ("mask", "train"):
            raise UserError(f"data.pad_steps is '{self.pad_steps}'; allowed are mask and train.")
        if self.image_path not in PATHS:
            raise unknown("data.image_path", self.image_path, PATHS)
        if len(self.color_jitter) != 4 or min(self.color_jitter) < 0:
            raise UserError(
                f"data.color_jitter is {list(self.color_jitter)}: give four widths, of brightness, contrast, "
                f"saturation and hue, 0 or more."
            )
        if self.crop_fraction is not None and not 0 < self.crop_fraction <= 1:
            raise UserError(f"data.crop_fraction is {self.crop_fraction}; it must be above 0 and at most 1.")
