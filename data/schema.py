"""The words that data, models, graphs and runtime share: sample, batch, contract, draw.

    reader → Sample → Processing.sample → fields of one sample → collate → Minibatch(batch, draw, ids) →
    model.loss

A *sample* is what a reader returns for one index, in canonical keys. A family's processing turns it into the
*fields* that the family's contract names; stacking the fields of B samples gives the *batch*. All randomness
of a step is in the *draw*, made by the loader from (seed, epoch, sample), so that it does not depend on
ranks, workers or devices, and a step is a pure function of its inputs that can be captured, replayed and
compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vlaforge.data.actions import ActionTransform, Pose

# ---------------------------------------------------------------------------------------------------- sample

Sample = dict[str, Any]
"""One sample in canonical keys, numpy throughout:

``observation.images.<cam>`` uint8 [H, W, 3], or [T, H, W, 3] for several frames; ``observation.state``
float32 [S] or [T, S]; ``action`` float32 [horizon, A]; ``action_is_pad`` bool [horizon]; ``<image
key>_is_pad`` bool [T] when several frames are read; ``task`` str; ``task_index``, ``episode_index``,
``frame_index``, ``index``, ``dataset_index`` int;
``timestamp`` float.
"""

IMAGES = "observation.images."
STATE = "observation.state"
ACTION = "action"
ACTION_IS_PAD = "action_is_pad"
TASK = "task"


@dataclass(frozen=True)
class DataNeeds:
    """What a family reads around one index; offsets are frames relative to it (0 is the current frame)."""

    action_offsets: tuple[int, ...] = (0,)
    image_offsets: tuple[int, ...] = (0,)
    state_offsets: tuple[int, ...] = (0,)
    cameras: tuple[str, ...] | None = None
    """Dataset camera names (without ``observation.images.``) to decode; None reads all."""


# ---------------------------------------------------------------------------------------------------- batch


class Batch(dict[str, Tensor]):
    """Tensors by contract name; each has the batch axis first."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Batch:
        return Batch({name: fn(value) for name, value in self.items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self.map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self.map(lambda t: t.pin_memory())

    @property
    def size(self) -> int:
        """The number of samples B."""
        return next(iter(self.values())).shape[0]


class Draw(Batch):
    """The random inputs of one step by name (noise, times, ...), each with the batch axis first."""


@dataclass
class Minibatch:
    """What the loader yields: the fields, the randomness, and which samples they are.

    `ids` [B] are global sample numbers, int64 on the CPU; `epoch` is theirs. `waited_s` is how long the
    consumer stood still for it. `stream` names the data stream it is from, in a run that has several.
    """

    batch: Batch
    draw: Draw
    ids: Tensor
    epoch: int = 0
    waited_s: float = 0.0
    stream: str = ""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Minibatch:
        batch, draw = (fields.to(device, non_blocking) for fields in (self.batch, self.draw))
        return replace(self, batch=batch, draw=draw)

    def pin_memory(self) -> Minibatch:
        return replace(self, batch=self.batch.pin_memory(), draw=self.draw.pin_memory())


# ----------------------------------------------------------------------------------------------------
# contract


@dataclass(frozen=True)
class Field:
    """One entry of a family's batch contract.

    Args:
        shape: without the batch axis; ints, full size (before any trimming).
        dtype: of the tensor that reaches the model.
        axes: one letter an axis of `shape` (without B), e.g. ``"VCHW"``; for messages and for `trim`.
        low, high: range of synthetic values (inclusive low, exclusive high for integers).
        observation: part of what `act` needs (targets and their masks are not).
        free: letters of `axes` whose size may be any (raw camera frames, which the model resizes).
        tail: (value, n): synthetic rows end in n entries of this value and have it nowhere else (image tokens, whose
            number a model counts on).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: str
    low: float = 0.0
    high: float = 1.0
    observation: bool = True
    free: str = ""
    tail: tuple[int, int] | None = None


@dataclass(frozen=True)
class Trim:
    """An axis that may be cut where `mask` is False for the whole batch, with no change to the result.

    Args:
        mask: name of the bool field [B, n] whose False entries may leave.
        cut: (field, axis) pairs that are cut; axis counts the batch axis as 0. The mask itself is cut only
            if it is among them (a model that must know how many slots there were keeps it whole).
        keep: ``"prefix"`` when valid entries stand in front (right padding: cut to the longest, rounded up to
            `multiple`), ``"suffix"`` when they stand at the end (left padding), ``"any"`` when entries may be
            dropped anywhere (camera slots).
    """

    mask: str
    cut: tuple[tuple[str, int], ...]
    keep: Literal["prefix", "suffix", "any"]
    multiple: int = 1


@dataclass(frozen=True)
class Contract:
    """Names, shapes and dtypes of a family's batch, plus its random inputs. Everything synthetic comes from here.

    `optional` fields are in a batch when all of its samples have them (augmentation parameters, say); an axis whose
    letter a trim cuts is cut with it.
    """

    fields: Mapping[str, Field]
    draws: Mapping[str, DrawSpec]
    trims: tuple[Trim, ...] = ()
    optional: Mapping[str, Field] = field(default_factory=dict)

    def synthetic(self, batch_size: int, seed: int = 0, device: torch.device | str = "cpu") -> Batch:
        """A correct random batch: float fields uniform in [low, high), ints in range, bool fields all True."""
        generator = torch.Generator().manual_seed(seed)
        batch = Batch()
        for name, spec in self.fields.items():
            shape = (batch_size, *spec.shape)
            if spec.dtype == torch.bool:
                value = torch.ones(shape, dtype=torch.bool)
            elif spec.dtype.is_floating_point:
                value = torch.rand(shape, generator=generator) * (spec.high - spec.low) + spec.low
            else:
                value = torch.randint(int(spec.low), max(int(spec.high), int(spec.low) + 1), shape, generator=generator)
                if spec.tail is not None:
                    special, count = spec.tail
                    value[value == special] = int(spec.low) + (special == int(spec.low))
                    value[..., -count:] = special
            batch[name] = value.to(spec.dtype)
        return batch.to(device)

    def check(self, batch: Mapping[str, Tensor], observation_only: bool = False) -> None:
        """Raises ValueError naming the field when one is missing, or has another rank or dtype.

        Sizes along trimmable axes may be smaller than declared; every other size must be equal.
        """
        loose = {(name, axis) for trim in self.trims for name, axis in trim.cut}
        for name, spec in self.fields.items():
            if observation_only and not spec.observation:
                continue
            if name not in batch:
                raise ValueError(f"batch lacks '{name}' [{'B' + spec.axes}]; it holds {sorted(batch)}")
            value = batch[name]
            if value.ndim != len(spec.shape) + 1:
                raise ValueError(
                    f"'{name}' has shape {tuple(value.shape)}; expected [B, {', '.join(map(str, spec.shape))}]"
                )
            for axis, (got, want) in enumerate(zip(value.shape[1:], spec.shape), start=1):
                free = spec.axes[axis - 1] in spec.free
                fits = free or (got <= want if (name, axis) in loose else got == want)
                if not fits:
                    raise ValueError(
                        f"'{name}' has shape {tuple(value.shape)}; expected [B, {', '.join(map(str, spec.shape))}]"
                    )


# ---------------------------------------------------------------------------------------------------- draw


@dataclass(frozen=True)
class DrawSpec:
    """One random input of a step.

    Args:
        shape: without the batch axis.
        kind: ``normal`` N(0, 1); ``uniform`` U(0, 1); ``beta`` Beta(a, b); ``stratified`` frac(u + i/B) with
            one u a step and i the sample's position in the global batch; ``seed`` one int64 a sample, for
            counter-based dropout.
        a, b: of the Beta distribution.
        scale, offset: the value is ``x * scale + offset`` (float kinds).
        wrap: the modulus of ``stratified``.
    """

    shape: tuple[int, ...] = ()
    kind: Literal["normal", "uniform", "beta", "stratified", "seed"] = "normal"
    a: float = 1.0
    b: float = 1.0
    scale: float = 1.0
    offset: float = 0.0
    wrap: float = 1.0


def sample_rng(seed: int, epoch: int, index: int, stream: str) -> np.random.Generator:
    """The random generator of one sample: a function of its arguments alone (counter-based Philox).

    `stream` separates uses ("augment", a draw's name), so adding one does not shift another.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}/{stream}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def make_draw(
    specs: Mapping[str, DrawSpec],
    ids: Sequence[int],
    *,
    seed: int,
    epoch: int | Sequence[int],
    step: int = 0,
    positions: Sequence[int] | None = None,
    global_batch: int | None = None,
) -> Draw:
    """The draw for the samples `ids`: float32 (or int64 for ``seed``) tensors [B, *shape] on the CPU.

    `epoch` is one number or one a sample. `positions` (default 0..B-1) and `global_batch` (default B) place
    the samples in the step's global batch; only ``stratified`` draws use them, and `step`.
    """
    epochs = [epoch] * len(ids) if isinstance(epoch, int) else list(epoch)
    positions = list(range(len(ids))) if positions is None else list(positions)
    total = global_batch or len(ids)
    draw = Draw()
    for name, spec in specs.items():
        if spec.kind == "stratified":
            u = sample_rng(seed, 0, step, f"draw.{name}").random()
            values = [np.full(spec.shape, (u + position / total) % spec.wrap) for position in positions]
        else:
            rngs: Iterator[np.random.Generator] = (
                sample_rng(seed, e, int(i), f"draw.{name}") for e, i in zip(epochs, ids)
            )
            values = [_one(spec, rng) for rng in rngs]
        stacked = np.stack(values)
        if spec.kind == "seed":
            draw[name] = torch.from_numpy(stacked.astype(np.int64))
        else:
            draw[name] = torch.from_numpy((stacked * spec.scale + spec.offset).astype(np.float32))
    return draw


def _one(spec: DrawSpec, rng: np.random.Generator) -> np.ndarray:
    if spec.kind == "normal":
        return rng.standard_normal(spec.shape, dtype=np.float32)
    if spec.kind == "uniform":
        return rng.random(spec.shape)
    if spec.kind == "beta":
        return np.asarray(rng.beta(spec.a, spec.b, spec.shape))
    if spec.kind == "seed":
        return np.asarray(rng.integers(0, 2**62, spec.shape))
    raise ValueError(f"unknown draw kind '{spec.kind}'")


@dataclass(frozen=True)
class DataConfig:
    """The `data:` section that every family shares; a family's own DataConfig extends it (frozen dataclass)."""

    cameras: dict[str, str] = field(default_factory=dict)
    """Camera slot of the model → dataset camera name (without ``observation.images.``). Empty: by order."""
    image_size: int = 224
    normalization_mode: str = "q99"
    action_key: str = ACTION
    state_key: str = STATE
    """Column of the action, of the state; several, separated by commas, are joined."""
    language_key: str | None = None
    """Column with the task's text or number; None takes `task_index`."""
    image_layout: Literal["hwc", "chw"] | None = None
    """`hwc` or `chw`, where the dataset leaves open which axis holds the channels."""
    hdf5_layout: Literal["aloha", "robomimic", "agilex"] | None = None
    """None finds out."""
    fps: float | None = None
    """Rows a second of HDF5 recordings, which seldom say."""
    action_mode: str = "absolute"
    """`absolute`, `relative` (to the state at the chunk's start) or `delta` (to the step before), see
    `actions`.
    """
    action_keep: tuple[int, ...] = ()
    """Action dimensions that stay absolute (a gripper)."""
    action_state_dims: tuple[int, ...] = ()
    """State dimension that each action dimension refers to; empty: the same number."""
    action_poses: tuple[str, ...] = ()
    """Poses among the actions, as `start:rotation` (``0:rot6d``); their differences are taken in SE(3)."""
    normalization_convention: str = "vlaforge"
    """How small ranges are treated: `vlaforge`, `openpi` or `lerobot`, see `normalize`."""

    @property
    def action_transform(self) -> ActionTransform:
        """What the options above say; UserError when they make no sense."""
        poses = tuple(Pose.parse(text) for text in self.action_poses)
        return ActionTransform(self.action_mode, self.action_keep, self.action_state_dims, poses)
