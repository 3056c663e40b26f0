"""What an action number means: absolute, relative to the present state, or the step since the one before.

The transform comes before normalisation, and statistics are taken after it (`statistics.compute`). Axes: H
steps of a chunk, A action dimensions, S state dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.rotation import SIZES, absolute_pose, relative_pose

MODES = ("absolute", "relative", "delta")
VERSION = 1
"""Raised whenever the numbers that a transform gives change: part of the key of cached statistics."""


@dataclass(frozen=True)
class Pose:
    """A block of the action that is a pose: dimensions start .. start + 3 + n, position first, then
    `rotation`.
    """

    start: int
    rotation: str = "rot6d"

    def __post_init__(self) -> None:
        if self.rotation not in SIZES:
            raise unknown("rotation", self.rotation, SIZES)

    @classmethod
    def parse(cls, text: str) -> Pose:
        """``"0:rot6d"`` → Pose(0, "rot6d")."""
        start, _, rotation = text.partition(":")
        if not start.isdigit():
            raise UserError(f"A pose is written start:rotation, such as 0:rot6d, not '{text}'.")
        return cls(int(start), rotation or "rot6d")

    @property
    def dims(self) -> range:
        return range(self.start, self.start + 3 + SIZES[self.rotation])


@dataclass(frozen=True)
class ActionTransform:
    """Absolute actions of a dataset → what the model learns, and back.

    Args:
        mode: ``absolute``; ``relative``: every step minus the state at the chunk's start (GR00T's relative
            actions, and what OpenPI calls delta); ``delta``: every step minus the one before, the first
            minus the state.
        keep: action dimensions that stay absolute (a gripper).
        state_dims: the state dimension that each action dimension refers to; empty: the same number.
        poses: blocks that are rigid poses; their difference is the SE(3) product, not a subtraction.
    """

    mode: str = "absolute"
    keep: tuple[int, ...] = ()
    state_dims: tuple[int, ...] = ()
    poses: tuple[Pose, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("action mode", self.mode, MODES)
        taken = [d for pose in self.poses for d in pose.dims] + list(self.keep)
        if len(set(taken)) != len(taken):
            raise UserError(f"Action dimensions {sorted({d for d in taken if taken.count(d) > 1})} are named twice.")

    @property
    def identity(self) -> bool:
        return self.mode == "absolute"

    def apply(self, action_HA: np.ndarray, state_S: np.ndarray | None) -> np.ndarray:
        """[..., H, A] and the state [..., S] at the chunk's start → [..., H, A] float32."""
        if self.identity:
            return np.asarray(action_HA, np.float32)
        action = np.asarray(action_HA, np.float64)
        reference = self._reference(state_S, action.shape[-1])[..., None, :]
        if self.mode == "delta":
            reference = np.concatenate([reference, action[..., :-1, :]], -2)
        return self._blocks(action, reference, np.subtract, relative_pose).astype(np.float32)

    def invert(self, action_HA: np.ndarray, state_S: np.ndarray | None) -> np.ndarray:
        """The inverse of `apply`: [..., H, A] as the robot takes it, float32."""
        if self.identity:
            return np.asarray(action_HA, np.float32)
        action = np.asarray(action_HA, np.float64)
        reference = self._reference(state_S, action.shape[-1])[..., None, :]
        if self.mode == "relative":
            return self._blocks(action, reference, np.add, absolute_pose).astype(np.float32)
        out = np.empty_like(action)
        for step in range(action.shape[-2]):
            here = slice(step, step + 1)
            out[..., here, :] = self._blocks(action[..., here, :], reference, np.add, absolute_pose)
            reference = out[..., here, :]
        return out.astype(np.float32)

    def to_dict(self) -> dict:
        """For keys of caches and for checkpoints."""
        return {"version": VERSION, **asdict(self)}

    def _reference(self, state_S: np.ndarray | None, dims: int) -> np.ndarray:
        if state_S is None:
            raise UserError(f"Action mode '{self.mode}' needs a state to refer to, and the dataset has none.")
        index: Sequence[int] = self.state_dims or range(dims)
        if len(index) != dims or max(index) >= np.shape(state_S)[-1]:
            raise UserError(
                f"Action mode '{self.mode}' needs a state dimension for each of {dims} action dimensions; "
                f"the state has {np.shape(state_S)[-1]}. Name them with data.action_state_dims."
            )
        return np.asarray(state_S, np.float64)[..., list(index)]

    def _blocks(self, action: np.ndarray, reference: np.ndarray, plain, rigid) -> np.ndarray:
        out = plain(action, reference)
        for pose in self.poses:
            dims = list(pose.dims)
            if dims[-1] >= action.shape[-1]:
                raise UserError(
                    f"The pose at {pose.start} ({pose.rotation}) ends behind the {action.shape[-1]} actions."
                )
            target = np.broadcast_to(reference[..., dims], action[..., dims].shape)
            out[..., dims] = rigid(action[..., dims], target, pose.rotation)
        if any(dim >= action.shape[-1] for dim in self.keep):
            raise UserError(f"data.action_keep names dimension {max(self.keep)}; the actions have {action.shape[-1]}.")
        out[..., list(self.keep)] = action[..., list(self.keep)]
        return out
