"""Fixtures shared by all areas, and a path without the repository's root (see test_namespace.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
# `python -m pytest` puts the working folder there, and our folders would pass for packages of the same names.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def metaworld() -> Path:
    """The bundled LeRobot v3.0 dataset: 6 episodes, 453 frames, two cameras."""
    return ROOT / "data" / "samples" / "metaworld_v30"


LONGEST = ("test_ranks.py",)
"""Run first, so that several processes end together rather than one alone with these."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` where there is none."""
    import torch

    items.sort(key=lambda item: item.path.name not in LONGEST)

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
