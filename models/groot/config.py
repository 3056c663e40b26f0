"""Hyperparameters of GR00T, and how data becomes its input: what N1.6 and N1.7 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vlaforge.data import schema
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.ranges import ranged
from vlaforge.models.action.dit import ContextConfig, DiTConfig
from vlaforge.models.action.groot import HeadConfig
from vlaforge.models.groot.images import PATHS


@dataclass(frozen=True)
class GrootConfig:
    """Hyperparameters of the head and of what is trained, named as in the published config.json.

    `image_size` is the height of images in the model, `image_width` their width where it is another one.
    `action_dim` and `state_dim` are the robot's (None: the dataset's), inside the model's `max_` ones.
    `mask_vl_padding` keeps padding out of the context's self-attention; published models let it in, so that a sample's
    loss depends on what it is batched with. `tune_top_llm_layers` counts from the last kept layer.
    """

    num_views: int = 2
    image_size: int = 224
    image_width: int | None = None
    max_token_len: int = 220
    select_layer: int = 16
    action_dim: int | None = None
    state_dim: int | None = None
    max_state_dim: int = 132
    max_action_dim: int = 132
    action_horizon: int = 40
    state_history_length: int = 1
    hidden_size: int = 1024
    max_num_embodiments: int = 32
    max_seq_len: int = 1024
    add_pos_embed: bool = True
    use_vlln: bool = True
    use_alternate_vl_dit: bool = True
    dit: DiTConfig = field(default_factory=DiTConfig)
    vl_self_attention: ContextConfig | None = None
    mask_vl_padding: bool = False
    state_dropout_prob: float = 0.0
    state_mask_token: bool = False
    noise_beta_alpha: float = 1.5
    noise_beta_beta: float = 1.0
    noise_s: float = 0.999
    num_timestep_buckets: int = 1000
    num_inference_timesteps: int = 4
    tune_llm: bool = False
    tune_visual: bool = False
    tune_top_llm_layers: int = ranged(0, low=0)
    tune_projector: bool = True
    tune_diffusion_model: bool = True
    tune_vlln: bool = True

    def __post_init__(self) -> None:
        text = self.text  # the family's
        if self.select_layer != text.layers:
            raise UserError(
                f"model.select_layer is {self.select_layer} and model.text.layers is {text.layers}: the language model "
                f"has the layers up to the selected one, so set both alike."
            )
        if not self.tune_llm and self.tune_top_llm_layers > text.layers:
            raise UserError(
                f"model.tune_top_llm_layers is {self.tune_top_llm_layers}; it must be at most model.text.layers, "
                f"{text.layers}."
            )
        if text.mrope is not None and sum(text.mrope) != text.head_dim // 2:
            raise UserError(
                f"model.text.mrope is {list(text.mrope)}: time, row and column must sum to half of "
                f"model.text.head_dim, {text.head_dim // 2}."
            )

    @property
    def frame(self) -> tuple[int, int]:
        """(height, width) of images in the model."""
        return self.image_size, self.image_width or self.image_size

    @property
    def state_width(self) -> int:
        """S: the width of the whole state history inside the model."""
        return self.max_state_dim * self.state_history_length

    def head(self) -> HeadConfig:
        return HeadConfig(
            state=self.state_width,
            action=self.max_action_dim,
            horizon=self.action_horizon,
            hidden=self.hidden_size,
            embodiments=self.max_num_embodiments,
            max_positions=self.max_seq_len,
            dit=self.dit,
            context=self.vl_self_attention,
            position_embedding=self.add_pos_embed,
            norm_context=self.use_vlln,
            drop_token=self.state_mask_token,
            state_dropout=self.state_dropout_prob,
            mask_context_padding=self.mask_vl_padding,
        )


def check_layers(name: str, numbers: Sequence[int], layers: int) -> None:
    """UserError unless `numbers`, of setting ``model.<name>``, are different layers of a tower with `layers`."""
    if len(set(numbers)) != len(numbers) or any(not 0 <= number < layers for number in numbers):
        tower = name.rpartition(".")[0]
        raise UserError(
            f"model.{name} is {list(numbers)}: they must be different numbers from 0 to {layers - 1}, as "
            f"model.{tower}.layers is {layers}."
        )


@dataclass(frozen=True)
class GrootDataConfig(schema.DataConfig):
    """Args:
    embodiment_tag: the robot, which chooses the weights around the action head; a name of the family's table (or of the
        official folder's), or a number.
    official_folder: folder of an official checkpoint. Its ``embodiment_id.json`` and ``processor_config.json`` replace
        the family's table and the options below that say so; its ``statistics.json``, where it has `embodiment_tag`,
        takes the place of the dataset's (and decides `normalization_mode` and relative actions). In a mixture each
        dataset is looked up by its own embodiment.
    official_statistics: read that ``statistics.json``.
    use_modality: read the dataset's ``meta/modality.json``: order of cameras, and of the parts of state and action.
    formalize_language: lower-case the task and leave out punctuation (processor_config wins).
    image_path: ``torch`` or ``albumentations``, see `images.ImageTransform` (processor_config wins).
    letter_box: pad a frame to a square before anything else (processor_config wins).
    shortest_image_edge: side that a frame is resized to before the crop; None: the model's image size (processor_config
        wins).
    crop_fraction: side of the centre crop, before the last resize; None: no crop (processor_config wins).
    image_augment: in training, a random crop instead of the centre one, `random_rotation_angle` and `color_jitter`; the
        same for all views of a sample, drawn from its own generator.
    random_rotation_angle: images are turned by up to as many degrees, either way (processor_config wins).
    color_jitter: widths of brightness, contrast, saturation and hue (processor_config wins).
    clip: normalised states and actions are clamped to [-1, 1]. As officially, states by mean and deviation are not, nor
        are such actions on their way back to robot units.
    sin_cos_embedding_keys: state parts (of ``meta/modality.json``) that the model sees as sines, then cosines, of their
        values in radians, in place of normalised ones (processor_config wins).
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
    random_rotation_angle: float = ranged(0.0, low=0, high=180)
    color_jitter: tuple[float, ...] = (0.3, 0.4, 0.5, 0.08)
    clip: bool = True
    sin_cos_embedding_keys: tuple[str, ...] = ()
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
