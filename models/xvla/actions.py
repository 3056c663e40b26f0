"""X-VLA's action spaces: which dimensions make which loss, and which are grippers.

Facts: github.com/2toinf/X-VLA ``action_hub.py``. Every term there is a mean over samples, steps and its
dimensions; here each is a masked (sum, count), so padded steps can be left out. Two means added there
(one an arm) are one mean over both arms with twice the weight, since both count equally.

Axes: B samples, H action steps, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.data.errors import unknown
from vlaforge.models.base import LossTerm


@dataclass(frozen=True)
class Term:
    """One part of the loss: squared error or binary cross-entropy on logits, over some dimensions."""

    name: str
    kind: Literal["mse", "bce"]
    dims: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class ActionSpace:
    """Args:
    dim: A, the model's action width.
    real_dim: how many leading dimensions the robot uses.
    grippers: dimensions hidden from the network's input (set to zero in state and noisy action).
    logits: dimensions that the network returns as logits (sigmoid at inference).
    """

    dim: int
    real_dim: int
    terms: tuple[Term, ...]
    grippers: tuple[int, ...] = ()
    logits: tuple[int, ...] = ()

    def shown(self, width: int) -> Tensor:
        """Bool [width]: False on the gripper channels, which the network's input does not show."""
        return torch.tensor([i not in self.grippers for i in range(width)], dtype=torch.bool)

    def losses(self, predicted_BHA: Tensor, target_BHA: Tensor, mask_BHA: Tensor) -> dict[str, LossTerm]:
        """Masked sums and counts a term, in fp32. Masked-out targets may hold anything."""
        predicted, target = predicted_BHA.float(), target_BHA.float()
        terms = {}
        for term in self.terms:
            p, t, mask = (_take(x, term.dims) for x in (predicted, target, mask_BHA))
            t = torch.where(mask, t, torch.zeros((), dtype=t.dtype, device=t.device))
            error = (
                (p - t).square() if term.kind == "mse" else F.binary_cross_entropy_with_logits(p, t, reduction="none")
            )
            kept = torch.where(mask, error, torch.zeros((), dtype=error.dtype, device=error.device))
            terms[term.name] = LossTerm(kept.sum(), mask.sum().float(), term.weight)
        return terms

    def counts(self, mask_BHA: Tensor) -> dict[str, Tensor]:
        return {term.name: _take(mask_BHA, term.dims).sum().float() for term in self.terms}

    def finish(self, action_BHA: Tensor) -> Tensor:
        """Network output → action: sigmoid on the gripper logits. [B, H, A] in and out."""
        if not self.logits:
            return action_BHA
        columns = [
            torch.sigmoid(column) if i in self.logits else column for i, column in enumerate(action_BHA.unbind(-1))
        ]
        return torch.stack(columns, dim=-1)


def _take(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x[..., dims] by slices: `dims` are few runs, and slices need no index tensor on the device."""
    runs: list[list[int]] = []
    for dim in dims:
        if runs and runs[-1][1] == dim:
            runs[-1][1] += 1
        else:
            runs.append([dim, dim + 1])
    parts = [x[..., start:end] for start, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _end_effector(gripper: Term, logits: bool) -> ActionSpace:
    """Two arms of (xyz, rot6d, gripper): 500 a position mean, 10 a rotation mean, each arm its own mean."""
    position = (0, 1, 2, 10, 11, 12)
    rotation = (3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 18)
    terms = (
        Term("position_loss", "mse", position, 2 * 500.0),
        Term("rotate6D_loss", "mse", rotation, 2 * 10.0),
        gripper,
    )
    hidden = (9, 19) if logits else ()
    return ActionSpace(dim=20, real_dim=20, terms=terms, grippers=hidden, logits=hidden)


def _joints_only(dim: int, real_dim: int) -> ActionSpace:
    return ActionSpace(dim, real_dim, (Term("joints_loss", "mse", tuple(range(real_dim)), 1.0),))


_FIXED: Mapping[str, ActionSpace] = {
    "ee6d": _end_effector(Term("gripper_loss", "bce", (9, 19), 1.0), logits=True),
    "agibot_ee6d": _end_effector(Term("gripper_loss", "mse", (9, 19), 10.0), logits=False),
    "joint": ActionSpace(
        14,
        14,
        (
            Term("joints_loss", "mse", (0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12), 1.0),
            Term("gripper_loss", "bce", (6, 13), 0.1),
        ),
        grippers=(6, 13),
        logits=(6, 13),
    ),
    "franka_joint7": _joints_only(20, 7),
    # Four overlapping means: the grippers count three times, once in each of joints, gripper and their arm.
    "so101_bimanual": ActionSpace(
        20,
        12,
        (
            Term("joints_loss", "mse", tuple(range(12)), 1.0),
            Term("gripper_loss", "mse", (5, 11), 1.0),
            Term("left_arm_loss", "mse", tuple(range(6)), 1.0),
            Term("right_arm_loss", "mse", tuple(range(6, 12)), 1.0),
        ),
        grippers=(5, 11),
        logits=(5, 11),
    ),
}

NAMES = (*_FIXED, "auto")


def action_space(name: str, real_dim: int, max_dim: int) -> ActionSpace:
    """The action space called `name`; ``auto`` takes the dataset's `real_dim` of the model's `max_dim`."""
    if name == "auto":
        return _joints_only(max_dim, real_dim)
    if name not in _FIXED:
        raise unknown("action_mode", name, NAMES)
    return _FIXED[name]
