"""A recorded sample → GR00T's batch fields, and its actions back to robot units: what N1.6 and N1.7 share.

Axes: V views, S side of an image, L tokens, H action steps, A action width of the model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from vlaforge.data.cameras import assign_cameras, check_image_size, frames_of, slot_names
from vlaforge.data.codec import ActionCodec, pad_last
from vlaforge.data.dataset import DatasetInfo
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.schema import STATE, TASK, DataNeeds, Sample
from vlaforge.data.tokenizer import Room, Tokenizer
from vlaforge.models.groot.colour import jitter
from vlaforge.models.groot.config import GrootConfig, GrootDataConfig
from vlaforge.models.groot.images import ImageTransform, formalize
from vlaforge.models.groot.mixture import resolve_mixture
from vlaforge.models.groot.modality import Modality
from vlaforge.models.groot.official import Official, Stats, places, resolve

Piece = str | int
"""Of a prompt: text, or a number of image tokens."""


class GrootProcessing(ABC):
    """Args:
    normalizers: entries ``action`` and ``state``.
    tokenizer: the backbone's; padding stands on the left.
    dataset_info: of the dataset that samples or observations come from.

    Raises UserError where data and model do not fit: cameras, dimensions, embodiment, tokenizer.
    """

    tokenizer_options: ClassVar[dict[str, Any]] = {"bos": False, "pad_side": "left"}
    image_word: ClassVar[str]
    """The token that stands for an image."""
    embodiments: ClassVar[Mapping[str, int]]

    def __init__(
        self,
        model_config: GrootConfig,
        data_config: GrootDataConfig,
        normalizers: NormalizerSet,
        tokenizer: Tokenizer,
        dataset_info: DatasetInfo,
    ):
        self.model, self.info, self.tokenizer = model_config, dataset_info, tokenizer
        self.data = self.official(model_config, data_config, dataset_info)[0]
        files = Official.of(self.data)
        self.numbers = (files and files.numbers) or self.embodiments
        self.action_dim = model_config.action_dim or dataset_info.action_dim
        self.modality = Modality.of(dataset_info, self.data) if self.data.use_modality else None
        self.codec = self._codec(normalizers, files)
        self.state_columns = self._state_columns(files)
        self.ranged = {kind: self._ranged(kind, files) for kind in ("state", "action")}
        self.cameras = self._cameras()
        data = self.data
        self.transform = ImageTransform(
            model_config.frame, data.shortest_image_edge, data.crop_fraction, data.letter_box, data.image_path
        )
        self.embodiment = self._number(self.data.embodiment_tag)
        vision = model_config.vision
        self.grid = tuple(size // vision.patch for size in model_config.frame)
        self.view_tokens = math.prod(size // vision.merge for size in self.grid)
        self._check()
        self.room = Room(model_config.max_token_len, "model.max_token_len", "words at the end of their task")

    @abstractmethod
    def prompt(self, text: str) -> list[Piece]:
        """The chat prompt around the task's `text`."""

    def extra(self, tokens_L: np.ndarray, mask_L: np.ndarray) -> dict[str, np.ndarray]:
        """Fields that only one backbone needs."""
        return {}

    @classmethod
    def official(
        cls, model: GrootConfig, data: GrootDataConfig, info: DatasetInfo, parts: Mapping[str, DatasetInfo] = {}
    ) -> tuple[GrootDataConfig, Stats | None]:
        """The options, and the statistics of an official checkpoint that the run goes on with (None: the dataset's). Of
        a mixture, `parts` are its datasets by embodiment, and statistics are by ``embodiment/column``."""
        if parts:
            return resolve_mixture(data, model.frame, model.action_horizon, parts, cls.embodiments)
        return resolve(data, model.frame, model.action_horizon, info)

    def _codec(self, normalizers: NormalizerSet, files: Official | None) -> ActionCodec:
        names = files.parts("action") if files else ()
        order = self.modality.order("action", self.action_dim, names) if self.modality else None
        return ActionCodec(self.data, normalizers, self.model.max_action_dim, order=order)

    def _state_columns(self, files: Official | None) -> list[int]:
        """What the model sees of [normalised state, sines, cosines], in its order."""
        parts, angles = places("state", self.info, self.data, files), self.data.sin_cos_embedding_keys
        for name in angles:
            if name not in parts:
                raise unknown("data.sin_cos_embedding_keys", name, parts)
        dim = self.info.state_dim
        blocks = {name: (dim, 2 * dim) if name in angles else (0,) for name in parts}
        return [first + d for name, dims in parts.items() for first in blocks[name] for d in dims]

    def _ranged(self, kind: str, files: Official | None) -> np.ndarray:
        """bool, by dimension of the dataset: normalised by a range, not by mean and deviation."""
        dim = self.info.state_dim if kind == "state" else self.action_dim
        ranged = np.full(dim, self.data.normalization_mode != "mean_std")
        deviating = files.deviating(kind) if files and files.governs else ()
        for name, dims in places(kind, self.info, self.data, files).items():
            ranged[list(dims)] &= name not in deviating
        return ranged

    def _cameras(self) -> tuple[str, ...]:
        count, slots = self.model.num_views, slot_names(self.model.num_views)
        ordered = self.modality.cameras if self.modality else ()
        chosen = self.data.cameras or dict(zip(slots, ordered))
        assigned = assign_cameras(chosen, self.info, count)
        if None in assigned:
            raise UserError(
                f"The model looks at {count} views, but {assigned.count(None)} of them have no camera: set "
                f"model.num_views={count - assigned.count(None)}, or name cameras with data.cameras."
            )
        return tuple(name for name in assigned if name is not None)

    def _check(self) -> None:
        model, data, tokenizer = self.model, self.data, self.tokenizer
        check_image_size(model.image_size, data.image_size)
        side = model.vision.patch * model.vision.merge
        if any(size % side for size in model.frame):
            height, width = model.frame
            raise UserError(f"Images are {height} × {width} in the model: both must be multiples of {side}.")
        self._check_frames()
        if tokenizer.vocab_size > model.text.vocab_size or tokenizer.token_id(self.image_word) != model.image_token:
            raise UserError(
                f"The tokenizer '{tokenizer.path}' has {tokenizer.vocab_size} entries and {self.image_word} as "
                f"{tokenizer.token_id(self.image_word)}, but model.text.vocab_size is {model.text.vocab_size} and "
                f"model.image_token {model.image_token}: give this model's tokenizer with --tokenizer-path."
            )
        for name, dim in (("action", self.action_dim), ("state", len(self.state_columns))):
            most = getattr(model, f"max_{name}_dim")
            if dim > most:
                twice = " (sines and cosines count both)" if name == "state" and data.sin_cos_embedding_keys else ""
                raise UserError(f"The {name} has {dim} dimensions{twice}, more than model.max_{name}_dim, {most}.")
        if data.action_steps is not None and not 0 < data.action_steps <= model.action_horizon:
            raise UserError(
                f"data.action_steps is {data.action_steps}; it must be between 1 and {model.action_horizon}."
            )
        if len(self._ids("")) > model.max_token_len:
            raise UserError(
                f"A prompt without any text has {len(self._ids(''))} tokens, more than model.max_token_len, "
                f"{model.max_token_len}: raise it."
            )

    def _check_frames(self) -> None:
        """UserError when the path that keeps aspects would give the model frames of another size than it has."""
        vision = self.model.vision
        for name in self.cameras:
            camera = self.info.cameras[name]
            natural = self.transform.natural(camera.height, camera.width, vision.patch * vision.merge)
            if natural != self.transform.size:
                height, width = natural
                raise UserError(
                    f"data.image_path=albumentations keeps aspects: camera '{name}' of {camera.height} × "
                    f"{camera.width} becomes {height} × {width}. Set model.image_size={height} "
                    f"model.image_width={width} data.image_size={height}, or pad all cameras to squares with "
                    f"data.letter_box=true."
                )

    def _number(self, tag: str) -> int:
        number = int(tag) if tag.isdigit() else self.numbers.get(tag)
        if number is None:
            raise unknown("data.embodiment_tag", tag, self.numbers)
        if number >= self.model.max_num_embodiments:
            raise UserError(
                f"data.embodiment_tag {tag} is number {number}; the model has {self.model.max_num_embodiments}."
            )
        return number

    def needs(self) -> DataNeeds:
        history = self.model.state_history_length
        return DataNeeds(
            action_offsets=tuple(range(self.model.action_horizon)),
            state_offsets=tuple(range(1 - history, 1)),
            cameras=self.cameras,
        )

    def sample(self, sample: Sample, rng: np.random.Generator, training: bool) -> dict[str, np.ndarray]:
        """One sample → fields without the batch axis; `rng` serves augmentation alone."""
        fields = self.observe(sample, rng if training and self.data.image_augment else None)
        actions_HA, mask_HA = self.codec.encode(sample)
        if self.data.pad_steps == "train":
            mask_HA[:, : self.action_dim] = True
        if self.data.action_steps is not None:
            mask_HA[self.data.action_steps :] = False
        return {**fields, "actions": self._clip(actions_HA), "action_mask": mask_HA}

    def observe(self, obs: Sample, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """What `act` needs. UserError when `obs` lacks one of the cameras."""
        frames = frames_of(obs, self.cameras)
        absent = [name for name, frame in zip(self.cameras, frames) if frame is None]
        if absent:
            raise UserError(f"The observation lacks the cameras {absent}, which the model looks at.")
        tokens_L, mask_L = self._tokens(str(obs.get(TASK, "")))
        return {
            "images": self._images([frame for frame in frames if frame is not None], rng),
            "tokens": tokens_L,
            "token_mask": mask_L,
            **self.extra(tokens_L, mask_L),
            "state": self._state(obs),
            "embodiment": np.array(self.embodiment_of(str(obs.get("embodiment", ""))), np.int64),
        }

    def actions(self, x_HA: np.ndarray, sample: Mapping[str, Any] | None = None) -> np.ndarray:
        """Normalised model output [..., H, A] → robot units [..., H, the robot's dimensions], float32.

        `sample` gives the state that relative actions refer to.
        """
        x_HA = np.asarray(x_HA, np.float32)[..., : self.action_dim]
        ranged_A = self.ranged["action"]
        inside_A = ranged_A if self.codec.order is None else ranged_A[self.codec.order]
        return self.codec.decode(np.where(inside_A, self._clip(x_HA), x_HA), sample)

    def embodiment_of(self, name: str) -> int:
        """The number of what a sample names: in a mixture, each dataset's own name where the table has it."""
        return self.numbers.get(name, self.embodiment)

    def _state(self, obs: Sample) -> np.ndarray:
        if not self.info.state_dim:
            return np.zeros(self.model.state_width, np.float32)
        normal, raw = self.codec.state(obs), np.asarray(obs[STATE], np.float32)
        normal = np.where(self.ranged["state"], self._clip(normal), normal)
        seen = np.concatenate([normal, np.sin(raw), np.cos(raw)], -1)[..., self.state_columns]
        return pad_last(seen, self.model.max_state_dim, "state").reshape(-1)

    def _clip(self, x: np.ndarray) -> np.ndarray:
        return np.clip(x, -1.0, 1.0).astype(np.float32) if self.data.clip else x

    def _images(self, frames: list[np.ndarray], rng: np.random.Generator | None) -> np.ndarray:
        if rng is None:
            return np.stack([self.transform(frame) for frame in frames])
        at, most = (float(rng.random()), float(rng.random())), self.data.random_rotation_angle
        degrees = float(rng.uniform(-most, most)) if most else 0.0
        return jitter(np.stack([self.transform(frame, at, degrees) for frame in frames]), self.data.color_jitter, rng)

    def _tokens(self, task: str) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 [L] and mask bool [L]; a task that is too long loses words at its end, never an image."""
        text, length = self._text(task), self.model.max_token_len
        ids = self._ids(text)
        self.room.tell(len(ids), text)
        while len(ids) > length:
            text = text[: max(text.rfind(" "), 0)]
            ids = self._ids(text)
        tokens_L, mask_L = np.full(length, self.tokenizer.pad_id, np.int64), np.zeros(length, bool)
        tokens_L[length - len(ids) :], mask_L[length - len(ids) :] = ids, True
        return tokens_L, mask_L

    def prompt_length(self, task: str) -> int:
        """Tokens of the task's prompt, uncut."""
        return len(self._ids(self._text(task)))

    def _text(self, task: str) -> str:
        return formalize(task) if self.data.formalize_language else task

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.prompt(text):
            ids += [self.model.image_token] * piece if isinstance(piece, int) else self.tokenizer.ids(piece)
        return ids
