"""π0.5's hyperparameters; the defaults are the published model's (``pi05_base``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlaforge.data import schema
from vlaforge.data.errors import UserError
from vlaforge.models.towers.gemma import GemmaConfig
from vlaforge.models.towers.siglip import SiglipConfig


@dataclass(frozen=True)
class ModelConfig:
    """Args:
    vision, language, expert: the towers; language and expert share depth, heads and head width (joint attention).
    vocab_size: rows of the token embedding.
    image_size: pixels a side that reach the vision tower.
    num_images: camera slots V; data may fill fewer.
    max_token_len: the longest prompt in tokens.
    action_dim, state_dim: the robot's; None takes the dataset's. They must fit into max_action_dim, max_state_dim.
    action_horizon: steps of a chunk, H.
    max_action_dim: A, the action width inside the model.
    max_state_dim: the largest state that may be written into the prompt.
    num_inference_steps: Euler steps of sampling.
    time_alpha, time_beta, time_scale, time_offset: training times are Beta(alpha, beta) · scale + offset.
    min_period, max_period: of the time embedding.
    freeze_vision_encoder: the vision tower is not trained. train_expert_only: nor is the language model.
    expert_lm_head: hold the expert's output head, which official checkpoints carry and nobody uses (263 M parameters at
        full size); without it the model is smaller and writes that entry as zeros.
    """

    model_type: str = "pi05"
    vision: SiglipConfig = field(default_factory=SiglipConfig)
    language: GemmaConfig = field(default_factory=GemmaConfig)
    expert: GemmaConfig = field(default_factory=lambda: GemmaConfig(width=1024, mlp_dim=4096))
    vocab_size: int = 257152
    image_size: int = 224
    num_images: int = 3
    max_token_len: int = 200
    action_dim: int | None = None
    state_dim: int | None = None
    action_horizon: int = 50
    max_action_dim: int = 32
    max_state_dim: int = 32
    num_inference_steps: int = 10
    time_alpha: float = 1.5
    time_beta: float = 1.0
    time_scale: float = 0.999
    time_offset: float = 0.001
    min_period: float = 4e-3
    max_period: float = 4.0
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False
    expert_lm_head: bool = True

    def __post_init__(self) -> None:
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim", "theta"):
            ours, theirs = getattr(self.language, name), getattr(self.expert, name)
            if ours != theirs:
                raise UserError(
                    f"model.language.{name} is {ours} and model.expert.{name} is {theirs}; both towers share their "
                    f"attention, so they must be equal."
                )
        for tower in ("language", "expert"):
            heads, shared = getattr(self, tower).num_heads, getattr(self, tower).num_kv_heads
            if heads % shared:
                raise UserError(f"model.{tower}.num_heads is {heads}, which num_kv_heads ({shared}) does not divide.")
        if self.image_size % self.vision.patch_size:
            raise UserError(
                f"model.image_size is {self.image_size}; it must be a multiple of vision.patch_size, "
                f"{self.vision.patch_size}."
            )
        if self.vision.width % self.vision.num_heads:
            raise UserError(
                f"model.vision.width is {self.vision.width}, which num_heads ({self.vision.num_heads}) does not divide."
            )
        if self.expert.width % 2:
            raise UserError(f"model.expert.width is {self.expert.width}; the time embedding needs it even.")
        if self.min_period >= self.max_period:
            raise UserError(f"model.min_period is {self.min_period}; it must be below max_period, {self.max_period}.")
        for name in ("action", "state"):
            dim, most = getattr(self, f"{name}_dim"), getattr(self, f"max_{name}_dim")
            if dim is not None and not 0 < dim <= most:
                raise UserError(
                    f"model.{name}_dim is {dim}; it must be between 1 and model.max_{name}_dim, which is {most}."
                )

    @property
    def image_tokens(self) -> int:
        """Tokens that one view takes in the prefix."""
        return self.vision.tokens(self.image_size)


@dataclass(frozen=True)
class DataConfig(schema.DataConfig):
    """Args:
    num_images: camera slots to fill; None: the model's. Fewer leave the others out of the sequence.
    image_mask: which slots may be used, one bool each; None: all.
    max_token_len: prompt tokens; None: the model's.
    image_antialias: False resizes as LeRobot (bilinear, in float, on the device), True as OpenPI's data transform
        (Pillow's antialiased bilinear, to uint8, on the CPU). They differ visibly when an image shrinks.
    resize_on_device: without antialiasing, ship raw frames and resize on the device (where all cameras of the dataset
        have one size); False resizes in the workers, rounded to uint8, as datasets of several sizes in one run need.
    normalization_convention: how small ranges are treated, see `data.normalize`.
    discrete_state_input: write the state into the prompt; False uses the task alone and no state (``pi05_libero``).
    loss_dims: ``real`` averages over the robot's action dimensions (LeRobot), ``all`` also over the padding (OpenPI).
    pad_steps: ``mask`` leaves steps beyond the episode's end out of the loss, ``train`` counts them (both published
        implementations do).
    image_augment: OpenPI's training augmentation (crop, rotation, colour), drawn from each sample's own generator and
        applied on the device in the pass that resizes.
    """

    num_images: int | None = None
    image_mask: tuple[bool, ...] | None = None
    max_token_len: int | None = None
    image_antialias: bool = False
    resize_on_device: bool = True
    normalization_convention: str = "vlaforge"
    discrete_state_input: bool = True
    loss_dims: str = "real"
    pad_steps: str = "mask"
    image_augment: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("loss_dims", ("real", "all")), ("pad_steps", ("mask", "train"))):
            if getattr(self, name) not in allowed:
                raise UserError(f"data.{name} is '{getattr(self, name)}'; allowed are {' and '.join(allowed)}.")
