"""Robot actions and states ↔ what a model sees: action mode, normalisation and padding in one place for all
families.

Axes: H steps, A the robot's dimensions, W the model's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlaforge.data.errors import UserError
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, STATE, DataConfig


class ActionCodec:
    """Encodes samples and decodes model output with the same objects, so the two cannot drift apart.

    Args:
        config: the run's DataConfig (action mode, poses, dimensions that stay absolute).
        normalizers: the run's, with ``action`` (and ``state``).
        width, state_width: of the model's action and state; the robot's dimensions come first. None: the
            robot's own.
        order: the robot's action dimensions, all of them, in the order that the model has them in; None: as they are.
    """

    def __init__(
        self,
        config: DataConfig,
        normalizers: NormalizerSet,
        width: int | None = None,
        state_width: int | None = None,
        order: Sequence[int] | None = None,
    ):
        self.transform = config.action_transform
        self.normalizers, self.width, self.state_width = normalizers, width, state_width
        self.order = None if order is None else list(order)

    def encode(self, sample: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """(actions float32 [H, W], mask bool [H, W]) of a sample that was read with its ``action``.

        Transformed, normalised, then padded with 0. The mask is True where the step exists in the episode
        and the dimension in the robot. UserError when the sample lacks its padding flags.
        """
        action = self.transform.apply(sample[ACTION], _last(sample.get(STATE)))
        action = self.normalizers.normalize("action", action, sample.get("embodiment", ""))
        if ACTION_IS_PAD not in sample:
            raise UserError(f"The sample has no '{ACTION_IS_PAD}': without it padded steps would be trained on.")
        if self.order is not None:
            action = action[..., self.order]
        valid = np.repeat(~np.asarray(sample[ACTION_IS_PAD], bool)[:, None], action.shape[1], 1)
        return pad_last(action, self.width, "action"), pad_last(valid, self.width, "action")

    def state(self, sample: Mapping[str, Any]) -> np.ndarray:
        """Normalised state float32 [..., state width]; padded with 0."""
        state = self.normalizers.normalize("state", sample[STATE], sample.get("embodiment", ""))
        return pad_last(state, self.state_width, "state")

    def decode(self, x_HW: np.ndarray, sample: Mapping[str, Any] | None = None) -> np.ndarray:
        """Model output [H, W] → robot units float32 [H, A]. `sample` holds the raw state (relative and delta
        actions need it) and the embodiment."""
        sample = sample or {}
        embodiment = sample.get("embodiment", "")
        dim = self.normalizers.get("action", embodiment).dim
        action = np.asarray(x_HW, np.float32)[..., :dim]
        if self.order is not None:
            action = action[..., np.argsort(self.order)]
        action = self.normalizers.denormalize("action", action, embodiment)
        return self.transform.invert(action, _last(sample.get(STATE)))


def pad_last(x: np.ndarray, width: int | None, what: str) -> np.ndarray:
    """Zeros (or False) behind the last axis up to `width`. UserError when it is longer."""
    missing = 0 if width is None else width - x.shape[-1]
    if missing < 0:
        raise UserError(f"The {what} has {x.shape[-1]} dimensions, but the model takes {width}.")
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _last(state: np.ndarray | None) -> np.ndarray | None:
    """The present state [S] of a sample with one or several."""
    return None if state is None else state[-1] if np.ndim(state) == 2 else state
