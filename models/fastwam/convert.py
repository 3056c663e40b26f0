"""FastWAM's public checkpoint layouts, and the start from Wan2.2's video model.

``release``: the authors' ``torch.save`` of {mot, proprio_encoder, step, torch_dtype}; read flat, as ``mot.<key>``.
``lerobot``: LeRobot 0.6.1's policy; its layers own the experts' blocks, older files name them as the release does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.data.errors import UserError
from vlaforge.models.convert import Account, Layout, Rule, State, read_safetensors
from vlaforge.models.video.frozen import read_state
from vlaforge.models.video.names import block_rules, expert_rules

_EXPERTS = tuple(rule for expert in ("video", "action") for rule in expert_rules(f"mot.mixtures.{expert}.", expert))
_PROPRIO = Rule("proprio_encoder.{rest}", "proprio_encoder.{rest}")
_ALIAS = "the same tensors stand under mot"

LAYOUTS = {
    "release": Layout(
        "release",
        (*_EXPERTS, _PROPRIO),
        # A full state dict of the official class holds the experts again under the names of its attributes.
        skips={"video_expert.*": _ALIAS, "action_expert.*": _ALIAS, "dit.*": _ALIAS, "step": "a counter"},
    ),
    "lerobot": Layout(
        "lerobot",
        (
            *block_rules("mot.layers.{i}.blocks.video", "layers.{i}.video"),
            *block_rules("mot.layers.{i}.blocks.action", "layers.{i}.action"),
            *_EXPERTS,
            _PROPRIO,
        ),
        prefix="model.",
    ),
}

WAN = "diffusion_pytorch_model"
FRESH = ("action.action_encoder.", "action.head.", "proprio_encoder.")
"""Parameters that Wan2.2 has no counterpart of."""


def pretrained(path: Path, shapes: Mapping[str, torch.Size]) -> tuple[State, Account] | None:
    """Wan2.2-TI2V-5B as a start: (our state dict without `FRESH`, account), or None when `path` is something else.

    `path` is Wan's folder with its DiT's ``diffusion_pytorch_model*.safetensors``. The video expert is that DiT. The
    action expert comes from an ``ActionDiT*.pt`` in the folder (the authors' file), else it is interpolated from the
    video expert, which is how that file was made.

    Raises:
        UserError: the DiT is of another size, or the ActionDiT file does not fit.
    """
    files = sorted(path.glob(f"{WAN}*.safetensors")) if path.is_dir() else []
    if not files:
        return None
    official = {name: value for file in files for name, value in read_safetensors(file).items()}
    layout = Layout("Wan2.2 DiT", expert_rules("", "video"))
    wanted = {key: shape for key, shape in shapes.items() if ".video." in key or key.startswith("video.")}
    state, account = layout.load(official, wanted)
    made = sorted(path.glob("ActionDiT*.pt"))
    action = {key: shape for key, shape in shapes.items() if key not in wanted and not key.startswith(FRESH)}
    state |= _action_file(made[0], action) if made else _interpolated(state, action)
    account.layout += f"; action expert {f'from {made[0].name}' if made else 'interpolated from it'}"
    account.loaded = sorted(state)
    account.new = sorted(key for key in shapes if key not in state)
    return state, account


def _action_file(path: Path, shapes: Mapping[str, torch.Size]) -> State:
    stored = read_state(path)
    if not isinstance(stored.get("backbone_state_dict"), Mapping):
        raise UserError(f"'{path}' is no ActionDiT file: it has no backbone_state_dict.")
    return Layout("ActionDiT", expert_rules("", "action")).load(stored["backbone_state_dict"], shapes)[0]


def _interpolated(video: State, shapes: Mapping[str, torch.Size]) -> State:
    source = {key: key.replace(".action.", ".video.").replace("action.", "video.", 1) for key in shapes}
    return {key: interpolate(video[source[key]], tuple(shape)) for key, shape in shapes.items()}


def interpolate(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`weight` resampled linearly along each axis to `shape` (end points kept), in its dtype.

    A matrix whose input width changed is scaled by √(old / new width), which keeps the size of its outputs.
    """
    out = weight.float()
    for axis, size in enumerate(shape):
        if out.shape[axis] != size:
            moved = out.movedim(axis, -1)
            rows = F.interpolate(moved.reshape(1, -1, moved.shape[-1]), size=size, mode="linear", align_corners=True)
            out = rows.reshape(*moved.shape[:-1], size).movedim(-1, axis)
    if weight.ndim >= 2 and weight.shape[-1] != shape[-1]:
        out = out * math.sqrt(weight.shape[-1] / shape[-1])
    return out.contiguous().to(weight.dtype)
