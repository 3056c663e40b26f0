"""A recorded sample → π0.5's batch fields, and its actions back to robot units.

Facts: openpi ``transforms.py``, ``tokenizer.py`` and ``model.py``; LeRobot 0.6.1 ``processor_pi05.py``.

Axes: V views, H action steps, A action dimensions inside the model, S state dimensions, L prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from vlaforge.data.cameras import assign_cameras, check_image_size, frames_of, one_size, slot_names, stack_views
from vlaforge.data.dataset import DatasetInfo
from vlaforge.data.errors import UserError
from vlaforge.data.images import resize_with_pad, resize_with_pad_pil, to_float
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, STATE, TASK, DataNeeds, Sample
from vlaforge.data.tokenizer import Room, Tokenizer
from vlaforge.data.transforms import ColorJitter, Compose, RandomCrop, Resize, ResizeWithPad, Rotate
from vlaforge.models.pi05.config import DataConfig, ModelConfig

BIN_EDGES = np.linspace(-1.0, 1.0, 257)[:-1]


def discretise(state_S: np.ndarray) -> np.ndarray:
    """Normalised state → int64 bins: 0 to 255 over [-1, 1), -1 below, and 255 from there up. Nothing is clipped."""
    return np.digitize(state_S, BIN_EDGES) - 1


def prompt(task: str, state_S: np.ndarray | None) -> str:
    """The text the model reads; `state` is normalised, None leaves it out (the form that π0 had)."""
    cleaned = task.strip().replace("_", " ").replace("\n", " ")
    if state_S is None:
        return f"{cleaned}\n"
    return f"Task: {cleaned}, State: {' '.join(map(str, discretise(state_S)))};\nAction: "


class Processing:
    """Args:
    normalizers: entries ``action`` and ``state``.
    dataset_info: of the dataset that samples or observations come from.

    Raises UserError where data and model do not fit: sizes, cameras, dimensions, tokenizer.
    """

    tokenizer_options: ClassVar[dict[str, Any]] = {"bos": True, "pad_id": 0}

    def __init__(
        self,
        model_config: ModelConfig,
        data_config: DataConfig,
        normalizers: NormalizerSet,
        tokenizer: Tokenizer,
        dataset_info: DatasetInfo,
    ):
        self.model, self.data, self.info = model_config, data_config, dataset_info
        self.normalizers, self.tokenizer = normalizers, tokenizer
        self.length = data_config.max_token_len or model_config.max_token_len
        setting = "data.max_token_len and model.max_token_len" if data_config.max_token_len else "model.max_token_len"
        self.room = Room(self.length, setting, "their end, 'Action:' included")
        self.action_dim = model_config.action_dim or dataset_info.action_dim
        self.transform = getattr(data_config, "action_transform", None)
        self._check()
        self.cameras = assign_cameras(data_config.cameras, dataset_info, self._slots(), data_config.image_mask)
        # Raw frames go to the device when it can do all that is left: one size, and no Pillow.
        on_device = data_config.resize_on_device and not data_config.image_antialias
        self.on_device = on_device and one_size(dataset_info, self.cameras)

    def _check(self) -> None:
        model, data = self.model, self.data
        check_image_size(model.image_size, data.image_size)
        if self.length > model.max_token_len:
            raise UserError(
                f"data.max_token_len is {self.length}, more than model.max_token_len, {model.max_token_len}."
            )
        if self.action_dim > model.max_action_dim:
            raise UserError(
                f"The actions have {self.action_dim} dimensions, more than model.max_action_dim, "
                f"{model.max_action_dim}."
            )
        if self.tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"The tokenizer '{self.tokenizer.path}' has {self.tokenizer.vocab_size} entries, but model.vocab_size "
                f"is {model.vocab_size}: give this model's tokenizer with --tokenizer-path."
            )

    def _slots(self) -> int:
        count = self.data.num_images or self.model.num_images
        if count > self.model.num_images:
            raise UserError(f"data.num_images is {count}, but the model has {self.model.num_images} camera slots.")
        return count

    def needs(self) -> DataNeeds:
        names = tuple(dict.fromkeys(name for name in self.cameras if name is not None))
        return DataNeeds(action_offsets=tuple(range(self.model.action_horizon)), cameras=names)

    def sample(self, sample: Sample, rng: np.random.Generator, training: bool) -> dict[str, np.ndarray]:
        """One sample → fields without the batch axis; `rng` serves augmentation alone."""
        fields = self.observe(sample, rng if training and self.data.image_augment else None)
        actions = np.asarray(sample[ACTION], np.float32)
        if self.transform is not None:
            actions = self.transform.apply(actions, sample.get(STATE))
        real = self.normalizers.normalize("action", actions, sample.get("embodiment", ""))
        horizon, width = self.model.action_horizon, self.model.max_action_dim
        padded, mask = np.zeros((horizon, width), np.float32), np.zeros((horizon, width), bool)
        padded[:, : real.shape[-1]] = real
        mask[:, : width if self.data.loss_dims == "all" else real.shape[-1]] = True
        if self.data.pad_steps == "mask":
            mask &= ~np.asarray(sample[ACTION_IS_PAD], bool)[:, None]
        return {**fields, "actions": padded, "action_mask": mask}

    def observe(self, obs: Sample, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """Images, prompt and their masks: what `act` needs. A camera missing from `obs` is masked."""
        frames = frames_of(obs, self.cameras)
        state = self._state(obs) if self.data.discrete_state_input else None
        tokens, token_mask = self._tokens(prompt(str(obs.get(TASK, "")), state))
        size = (self.model.image_size, self.model.image_size)
        images = stack_views(frames, size, self._resized, raw=self.on_device)
        augmented = {} if rng is None else {"placements": self._placements(images, rng)}
        return {
            "images": images,
            "image_mask": np.array([frame is not None for frame in frames]),
            "tokens": tokens,
            "token_mask": token_mask,
            **augmented,
        }

    def actions(self, x_HA: np.ndarray, sample: Mapping[str, Any] | None = None) -> np.ndarray:
        """Normalised model output [..., H, A] → robot units [..., H, action_dim], float32.

        `sample` gives the state that relative actions refer to.
        """
        sample = sample or {}
        x_HA = np.asarray(x_HA, np.float32)[..., : self.action_dim]
        actions = self.normalizers.denormalize("action", x_HA, sample.get("embodiment", ""))
        if self.transform is not None:
            actions = self.transform.invert(actions, sample.get(STATE))
        return actions

    def _state(self, obs: Sample) -> np.ndarray:
        if STATE not in obs:
            raise UserError(
                "π0.5 writes the robot's state into the prompt, but the dataset has none: name its column with "
                "data.state_key, or set data.discrete_state_input=false."
            )
        return self.normalizers.normalize("state", obs[STATE], obs.get("embodiment", ""))

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        tokens, mask = self.tokenizer.encode(text, self.length)
        if mask.all() and not self.room.said:
            self.room.tell(len(self.tokenizer.ids(text)), text)
        return tokens, mask

    def prompt_length(self, task: str) -> int:
        """Tokens of the task's prompt with the state that takes most, three digits a dimension."""
        state_S = np.ones(self.info.state_dim) if self.data.discrete_state_input else None
        return len(self.tokenizer.ids(prompt(task, state_S)))

    def _placements(self, images_VHWC: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """float32 [V, 16]: OpenPI's training augmentation, which the device applies as it resizes."""
        steps = [augmentation(self.model.image_size, wrist="wrist" in slot) for slot in self.slots]
        return np.concatenate([s.params(frame[None], [rng]) for s, frame in zip(steps, images_VHWC)])

    def _resized(self, frame: np.ndarray) -> np.ndarray:
        size = self.model.image_size
        if self.data.image_antialias:
            return resize_with_pad_pil(frame, size, size)
        resized = resize_with_pad(to_float(torch.from_numpy(np.ascontiguousarray(frame))[None]), size, size)
        return (resized[0].permute(1, 2, 0) * 255.0).round().to(torch.uint8).numpy()

    @property
    def slots(self) -> tuple[str, ...]:
        return slot_names(len(self.cameras))


def augmentation(size: int, wrist: bool) -> Compose:
    """Resize, and OpenPI's training augmentation of one view; wrist cameras change colour only."""
    shape = () if wrist else (RandomCrop(0.95), Resize(size, size), Rotate(5.0))
    colour = ColorJitter(brightness=0.3, contrast=0.4, saturation=0.5)
    return Compose((ResizeWithPad(size, size), *shape, colour))
