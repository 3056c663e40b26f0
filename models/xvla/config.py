"""X-VLA's hyperparameters; defaults are X-VLA-0.9B's (2toINF/X-VLA, Florence-2-large)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vlaforge.data import schema
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.ranges import ranged
from vlaforge.models.towers.florence2 import BartConfig, DaViTConfig
from vlaforge.models.xvla.actions import NAMES, ActionSpace, action_space

# Which soft prompt and which domain weights a robot uses (published with X-VLA); others are 0.
DOMAINS = {
    "bridge": 0, "rt1": 1, "calvin": 2, "libero": 3, "widowx-air": 4, "air-agilex-hq": 5, "robotwin2": 6,
    "robocasa-human": 7, "vlabench": 8, "agibot-challenge": 9, "air-agilex": 10, "robomind-franka": 11,
    "robomind-ur": 12, "droid-left": 13, "droid-right": 14, "agibot": 15, "robomind-agilex": 16,
    "robomind-franka-dual": 17, "airbot": 18,
}  # fmt: skip


def domain_number(name: str | None, count: int, strict: bool = True) -> int | None:
    """The number of a robot's name (or of a number) among `count` domains; None without a name.

    A name or number that is not there is a UserError, or None where `strict` is False.
    """
    if name is None:
        return None
    text = str(name).lower().replace("_", "-")
    if text.startswith("robotwin2"):
        text = "robotwin2"
    number = int(text) if text.isdigit() else DOMAINS.get(text)
    if number is None and strict:
        raise unknown("data.domain", str(name), DOMAINS)
    if number is not None and number >= count:
        if not strict:
            return None
        raise UserError(f"data.domain is {name}, number {number}; the model has {count} domains.")
    return number


@dataclass(frozen=True)
class ModelConfig:
    """Args:
    image_size: pixels a side that reach the vision tower.
    image_resize: how frames come to it: ``resize`` (antialiased bicubic, the aspect is not kept) or ``pad_left_top``
        (aspect kept, padded at the left and top, as LeRobot's option).
    num_image_views: camera slots V; the first one is read together with the text.
    action_horizon: H. action_mode: see `actions.py`.
    action_dim, state_dim: the robot's; None takes the dataset's.
    max_state_dim: width of the state input; max_action_dim: the model's action width for ``auto``.
    max_len_seq: rows of the position table; the sequence without soft prompts must fit.
    """

    model_type: str = "xvla"
    vision: DaViTConfig = field(default_factory=DaViTConfig)
    text: BartConfig = field(default_factory=BartConfig)
    image_positions: int = 50
    image_frames: int = 100
    image_size: int = 224
    image_resize: Literal["resize", "pad_left_top"] = "resize"
    num_image_views: int = 3
    max_token_len: int = 50
    hidden_size: int = 1024
    depth: int = 24
    num_heads: int = 16
    mlp_ratio: float = 4.0
    num_domains: int = 30
    len_soft_prompts: int = ranged(32, low=0)
    dim_time: int = 32
    max_len_seq: int = 512
    use_hetero_proj: bool = False
    attn_dropout: float = 0.1
    mlp_dropout: float = 0.1
    use_proprio: bool = True
    action_mode: str = "ee6d"
    action_horizon: int = 30
    action_dim: int | None = None
    state_dim: int | None = None
    max_action_dim: int = 20
    max_state_dim: int = 20
    num_inference_steps: int = 10

    def __post_init__(self) -> None:
        if self.action_mode not in NAMES:
            raise UserError(f"model.action_mode '{self.action_mode}' is unknown: allowed are {', '.join(NAMES)}.")
        if self.image_resize not in ("resize", "pad_left_top"):
            raise UserError(f"model.image_resize is '{self.image_resize}'; allowed are resize and pad_left_top.")
        if self.action_dim is not None and not 0 < self.action_dim <= self.action_width:
            raise UserError(
                f"model.action_dim is {self.action_dim}, but action space '{self.action_mode}' has {self.action_width} "
                f"dimensions: choose another model.action_mode (auto takes any, up to model.max_action_dim)."
            )
        if self.sequence > self.max_len_seq:
            raise UserError(
                f"model.max_len_seq is {self.max_len_seq}; {self.action_horizon} action tokens, {self.max_token_len} "
                f"text tokens and {self.num_image_views} views make {self.sequence}: raise it or shorten them."
            )

    @property
    def space(self) -> ActionSpace:
        return action_space(self.action_mode, self.action_dim or self.max_action_dim, self.max_action_dim)

    @property
    def action_width(self) -> int:
        """A: the action width inside the model."""
        return self.space.dim

    @property
    def state_width(self) -> int:
        """S: the state width inside the model; 0 without it."""
        return self.max_state_dim if self.use_proprio else 0

    @property
    def view_tokens(self) -> int:
        return 1 + self.vision.tokens(self.image_size)

    @property
    def sequence(self) -> int:
        return self.action_horizon + self.max_token_len + self.num_image_views * self.view_tokens


@dataclass(frozen=True)
class DataConfig(schema.DataConfig):
    """Args:
    normalization_mode: X-VLA trains on raw end-effector poses, so ``identity``; action spaces without gripper logits
        may have any other.
    domain: a name of `DOMAINS`, a number, or None: by the dataset's robot type, else 0.
    pad_actions: ``mask`` leaves steps beyond the episode's end and dimensions that the robot lacks out of the loss;
        ``train`` counts them, as published.
    """

    normalization_mode: str = "identity"
    domain: str | None = None
    pad_actions: str = "mask"

    def __post_init__(self) -> None:
        if self.pad_actions not in ("mask", "train"):
            raise UserError(f"data.pad_actions is '{self.pad_actions}'; allowed are mask and train.")
