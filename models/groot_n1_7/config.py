"""GR00T N1.7's hyperparameters; defaults are GR00T-N1.7-3B's (Cosmos-Reason2-2B backbone)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlaforge.data.errors import UserError
from vlaforge.models.action.dit import ContextConfig
from vlaforge.models.groot.config import GrootConfig, GrootDataConfig, check_layers
from vlaforge.models.towers.qwen3 import Qwen3Config
from vlaforge.models.towers.qwen3_vision import Qwen3VisionConfig

# Which weights around the action head a robot uses; an official folder's embodiment_id.json wins.
EMBODIMENTS = {
    "simpler_env_google": 0, "simpler_env_widowx": 1, "libero_sim": 2, "new_embodiment": 10,
    "oxe_droid_relative_eef_relative_joint": 24, "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25, "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26, "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26, "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig(GrootConfig):
    """`text.layers` is what is kept of the language model (`select_layer`)."""

    model_type: str = "groot_n1_7"
    vision: Qwen3VisionConfig = field(default_factory=Qwen3VisionConfig)
    text: Qwen3Config = field(default_factory=Qwen3Config)
    image_size: int = 256
    vl_self_attention: ContextConfig | None = field(default_factory=ContextConfig)
    state_dropout_prob: float = 0.2
    image_token: int = 151655
    vision_start_token: int = 151652
    vision_end_token: int = 151653

    def __post_init__(self) -> None:
        super().__post_init__()
        taps = self.vision.deepstack
        check_layers("vision.deepstack", taps, self.vision.layers)
        if len(taps) > self.text.layers:
            raise UserError(
                f"model.vision.deepstack is {list(taps)}: each is added behind a layer of the language model, and "
                f"model.text.layers is {self.text.layers}."
            )


@dataclass(frozen=True)
class DataConfig(GrootDataConfig):
    """The published image transform: resize to 256, the middle 230, and 256 again."""

    image_size: int = 256
    crop_fraction: float | None = 230 / 256
