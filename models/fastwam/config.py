"""FastWAM's hyperparameters. Defaults are the full-size model of the LIBERO release (6.02 B trained parameters)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlaforge.data import schema
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.ranges import ranged
from vlaforge.models.action.schedule import ShiftedFlow
from vlaforge.models.video.canvas import LAYOUTS
from vlaforge.models.video.masks import VIDEO_RULES
from vlaforge.models.video.text import Umt5Config
from vlaforge.models.video.vae import VaeConfig

PROMPT = "A video recorded from a robot's point of view executing the following instruction: {task}"
VARIANTS = ("uncond", "base", "joint", "idm")


@dataclass(frozen=True)
class ExpertConfig:
    """Width of one expert's DiT; both share layers, heads and head_dim, because they meet in one attention."""

    dim: int
    ffn_dim: int


@dataclass(frozen=True)
class ScheduleConfig:
    """Noise schedule of one modality: the shift of training and of sampling, and the range of time."""

    train_shift: float = 5.0
    infer_shift: float = 5.0
    num_train_timesteps: int = 1000

    def flow(self) -> ShiftedFlow:
        return ShiftedFlow(self.train_shift, self.num_train_timesteps, self.infer_shift)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture, losses and where the frozen encoders come from.

    Args:
        variant: which video the action may look at: ``uncond`` (alias ``base``) the first frame; ``joint`` all frames;
            ``idm`` a second copy of the video that is clean or lightly noised, while the first copy is denoised.
        video, action: widths of the two experts.
        layers, heads, head_dim: of both.
        text_dim, text_tokens: width and padded length of the encoded prompt.
        freq_dim: size of the sinusoid of the time.
        latent_channels, patch: of the video latents and their patches (frames, rows, columns).
        height, width: of the canvas of all cameras, pixels; multiples of 32 (VAE 16, patch 2).
        video_frames: pixel frames, 1 + 4k.
        layout: how cameras share the canvas (`models.video.canvas.slots`): ``row`` or ``head_over_wrists``.
        action_dim, state_dim: the robot's; None takes the dataset's. They must fit into max_action_dim, max_state_dim.
        max_action_dim, max_state_dim: widths of the model (official names: action_dim, proprio_dim). A robot with fewer
            dimensions is padded and masked. max_state_dim 0 builds no proprioception token.
        action_horizon: steps of a chunk, H; a multiple of video_frames - 1.
        num_inference_steps: Euler steps of sampling.
        video_attention: mask among video tokens (`models.video.masks.VIDEO_RULES`). Sampling of actions alone needs
            ``first_frame_causal``.
        cond_noise_prob: ``idm``: how often a sample's conditioning video is noised in training.
        lambda_video, lambda_action: weights of the two losses.
        video_source: what a batch holds: ``pixels`` (the VAE runs in the step) or ``latents`` (from a cache).
        text_source: ``tokens`` (the text encoder runs in the step) or ``context`` (from a cache).
        encoded_dtype: what latents and context are rounded to, online and in caches alike.
        vae, text: the frozen encoders.
        skip_unused: leave out the last layer's tokens that reach neither loss nor action. False computes them, for
            comparisons.
        eps: of all norms.
    """

    model_type: str = "fastwam"
    variant: str = "uncond"
    video: ExpertConfig = field(default_factory=lambda: ExpertConfig(3072, 14336))
    action: ExpertConfig = field(default_factory=lambda: ExpertConfig(1024, 4096))
    layers: int = 30
    heads: int = 24
    head_dim: int = 128
    text_dim: int = 4096
    text_tokens: int = 128
    freq_dim: int = 256
    latent_channels: int = 48
    patch: tuple[int, int, int] = ranged((1, 2, 2), low=1)
    layout: str = "row"
    height: int = 224
    width: int = 448
    video_frames: int = 9
    action_dim: int | None = None
    state_dim: int | None = None
    max_action_dim: int = 7
    max_state_dim: int = ranged(8, low=0)
    action_horizon: int = 32
    num_inference_steps: int = 10
    video_attention: str = "first_frame_causal"
    cond_noise_prob: float = 0.5
    video_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    action_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lambda_video: float = 1.0
    lambda_action: float = 1.0
    video_source: Literal["pixels", "latents"] = "pixels"
    text_source: Literal["tokens", "context"] = "tokens"
    encoded_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    vae: VaeConfig = field(default_factory=VaeConfig)
    text: Umt5Config = field(default_factory=Umt5Config)
    skip_unused: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.variant == "base":
            object.__setattr__(self, "variant", "uncond")
        if self.variant not in VARIANTS:
            raise unknown("model.variant", self.variant, VARIANTS)
        if self.layout not in LAYOUTS:
            raise unknown("model.layout", self.layout, LAYOUTS)
        for name in ("action", "state"):
            dim, most = getattr(self, f"{name}_dim"), getattr(self, f"max_{name}_dim")
            if dim is not None and dim > most:
                raise UserError(f"model.{name}_dim is {dim}, more than model.max_{name}_dim, which is {most}.")
        if self.video_attention not in VIDEO_RULES:
            raise unknown("model.video_attention", self.video_attention, VIDEO_RULES)
        if self.variant == "idm" and self.video_attention == "bidirectional":
            raise UserError(
                "model.variant 'idm' shares the first frame between two copies of the video, so model.video_attention "
                "must be first_frame_causal or per_frame_causal."
            )
        if self.vae.z_dim != self.latent_channels or self.text.dim != self.text_dim:
            raise UserError(
                f"The encoders do not fit the model: model.vae.z_dim {self.vae.z_dim} must be model.latent_channels "
                f"{self.latent_channels}, and model.text.dim {self.text.dim} must be model.text_dim {self.text_dim}."
            )
        side = self.vae.spatial * self.patch[1], self.vae.spatial * self.patch[2]
        if self.height % side[0] or self.width % side[1]:
            raise UserError(f"model.height {self.height} and model.width {self.width} must be multiples of {side}.")
        if (self.video_frames - 1) % self.vae.temporal or self.video_frames < 1 + self.vae.temporal:
            raise UserError(
                f"model.video_frames is {self.video_frames}: it must be 1 + {self.vae.temporal}k, at least one k."
            )
        if self.action_horizon % (self.video_frames - 1):
            raise UserError(
                f"model.action_horizon {self.action_horizon} must be a multiple of model.video_frames - 1 = "
                f"{self.video_frames - 1}, so that each video frame stands for the same number of actions."
            )

    @property
    def latent_size(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of the latents."""
        scale = self.vae.spatial
        return 1 + (self.video_frames - 1) // self.vae.temporal, self.height // scale, self.width // scale

    @property
    def grid(self) -> tuple[int, int, int]:
        """(frames, rows, columns) of the patches, that is of the video tokens."""
        return tuple(size // patch for size, patch in zip(self.latent_size, self.patch))

    @property
    def frame_tokens(self) -> int:
        """Video tokens of one latent frame."""
        return self.grid[1] * self.grid[2]

    @property
    def frame_stride(self) -> int:
        """Raw frames (and actions) between two video frames."""
        return self.action_horizon // (self.video_frames - 1)


@dataclass(frozen=True)
class DataConfig(schema.DataConfig):
    """Args:
    normalization_mode: of actions and state: ``min_max`` (the LIBERO release), ``mean_std`` (RoboTwin) or ``q99``.
    clip: normalised values are clamped to ±clip.
    delta_dims: action dimensions that are displacements; a padded step carries 0 in them and the last action's value in
        the others.
    prompt: the template around the task.
    cache: folder written by ``forge-data precompute``, for `video_source` ``latents`` and `text_source` ``context``.
    text_cache: folder of official text caches (``<sha256 of the prompt>.t5_len128.wan22ti2v5b.pt``), instead of
    `cache`.
    """

    normalization_mode: str = "min_max"
    clip: float | None = 5.0
    delta_dims: tuple[int, ...] = ()
    prompt: str = PROMPT
    cache: str = ""
    text_cache: str = ""
