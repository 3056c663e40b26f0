"""The files beside GR00T N1.6's weights in NVIDIA's layout; see `models.groot.companions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlaforge.models.companions import Files, Statistics
from vlaforge.models.groot.companions import nvidia
from vlaforge.models.groot_n1_6.config import EMBODIMENTS, DataConfig, ModelConfig

KIND = {
    "architectures": ["Gr00tN1d6"],
    "model_type": "Gr00tN1d6",
    "backbone_model_type": "eagle",
    "model_name": "aravindhs-NV/eagle3-processor-groot-n1d6",
}


def companions(
    layout: str, model: ModelConfig, data: DataConfig, dataset: Mapping[str, Any], statistics: Statistics
) -> Files:
    """See `models.companions`; LeRobot's layout is weights alone (its policy reads NVIDIA's files)."""
    return {} if layout == "lerobot" else nvidia(KIND, EMBODIMENTS, model, data, dataset, statistics)
