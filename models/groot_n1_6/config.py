"""GR00T N1.6's hyperparameters; defaults are GR00T-N1.6-3B's (Eagle-Block2A-2B-v2 backbone)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlaforge.models.groot.policy import GrootConfig
from vlaforge.models.towers.qwen3 import Qwen3Config
from vlaforge.models.towers.siglip2 import Siglip2Config


@dataclass(frozen=True)
class ModelConfig(GrootConfig):
    """`text.layers` is what is kept of the language model (`select_layer`)."""

    model_type: str = "groot_n1_6"
    vision: Siglip2Config = field(default_factory=Siglip2Config)
    text: Qwen3Config = field(default_factory=lambda: Qwen3Config(vocab_size=151680, theta=1e6, mrope=None))
    max_state_dim: int = 128
    max_action_dim: int = 128
    action_horizon: int = 50
    tune_top_llm_layers: int = 4
    image_token: int = 151669
