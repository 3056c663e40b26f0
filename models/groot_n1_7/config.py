"""GR00T N1.7's hyperparameters; defaults are GR00T-N1.7-3B's (Cosmos-Reason2-2B backbone)."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlaforge.models.action.groot import ContextConfig
from vlaforge.models.groot.policy import GrootConfig
from vlaforge.models.towers.qwen3 import Qwen3Config
from vlaforge.models.towers.qwen3_vision import Qwen3VisionConfig


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
