"""GR00T N1.6's hyperparameters; defaults are GR00T-N1.6-3B's (Eagle-Block2A-2B-v2 backbone)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlaforge.data.ranges import ranged
from vlaforge.models.groot.config import GrootConfig, GrootDataConfig, check_layers
from vlaforge.models.towers.qwen3 import Qwen3Config
from vlaforge.models.towers.siglip2 import Siglip2Config

# Which weights around the action head a robot uses; an official folder's embodiment_id.json wins.
EMBODIMENTS = {
    "oxe_google": 0, "oxe_widowx": 1, "libero_panda": 2, "unitree_g1": 8, "new_embodiment": 10,
    "robocasa_panda_omron": 13, "oxe_droid": 16, "gr1": 20, "behavior_r1_pro": 24,
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig(GrootConfig):
    """`text.layers` is what is kept of the language model (`select_layer`)."""

    model_type: str = "groot_n1_6"
    vision: Siglip2Config = field(default_factory=Siglip2Config)
    text: Qwen3Config = field(default_factory=lambda: Qwen3Config(vocab_size=151680, theta=1e6, mrope=None))
    max_state_dim: int = 128
    max_action_dim: int = 128
    action_horizon: int = 50
    tune_top_llm_layers: int = ranged(4, low=0)
    image_token: int = 151669

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("vision.full_layers", self.vision.full_layers, self.vision.layers)


@dataclass(frozen=True)
class DataConfig(GrootDataConfig):
    """The published image geometry: resize to 256, the middle 95 %, and 224."""

    shortest_image_edge: int | None = 256
    crop_fraction: float | None = 0.95
