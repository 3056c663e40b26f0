"""FastWAM's recorded model, from which several files here start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vlaforge.models.fastwam.golden import Golden
from vlaforge.models.fastwam.model import Model
from vlaforge.models.golden import Folder


@pytest.fixture(scope="module")
def folder() -> Folder:
    """The recorded numbers of FastWAM."""
    return Folder.read(Path(__file__).parents[1] / "golden" / "fastwam")


@pytest.fixture(scope="module")
def small(folder) -> Callable[..., Model]:
    """``small(variant, **changes)``: FastWAM's golden model with its weights, as another variant."""

    def build(variant: str, **changes) -> Model:
        golden = Golden(folder)
        model = Model(replace(golden.config, variant=variant, **changes))
        golden.load(model)
        return model

    return build
