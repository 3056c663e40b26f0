"""A recorded sample → X-VLA's batch fields, and its actions back to robot units.

Facts: github.com/2toinf/X-VLA ``datasets``; LeRobot 0.6.1 ``policies/xvla``.

Axes: V views, H action steps, A action and S state width of the model, L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from vlaforge.data.cameras import assign_cameras, check_image_size, frames_of, one_size, stack_views
from vlaforge.data.codec import ActionCodec
from vlaforge.data.dataset import DatasetInfo
from vlaforge.data.errors import UserError
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.schema import TASK, DataNeeds, Sample
from vlaforge.data.tokenizer import Room, Tokenizer
from vlaforge.models.blocks.image import NormalizeImages
from vlaforge.models.xvla.config import DataConfig, ModelConfig, domain_number


class Processing:
    """Args:
    normalizers: entries ``action`` and ``state``.
    tokenizer: BART's; a prompt is <s>, the instruction, </s>, then padding, which the model reads as well.
    dataset_info: of the dataset that samples or observations come from.

    Raises UserError where data and model do not fit: cameras, dimensions, domain, tokenizer.
    """

    tokenizer_options: ClassVar[dict[str, Any]] = {"bos": True, "eos": True}
    reads_robot_type = True

    def __init__(
        self,
        model_config: ModelConfig,
        data_config: DataConfig,
        normalizers: NormalizerSet,
        tokenizer: Tokenizer,
        dataset_info: DatasetInfo,
    ):
        self.model, self.data, self.info, self.tokenizer = model_config, data_config, dataset_info, tokenizer
        self.action_dim = model_config.action_dim or dataset_info.action_dim
        self.room = Room(model_config.max_token_len, "model.max_token_len")
        self.codec = ActionCodec(data_config, normalizers, model_config.action_width, model_config.state_width)
        assigned = assign_cameras(data_config.cameras, dataset_info, model_config.num_image_views)
        # Empty slots stand last, so that the batch can be cut behind the views that are there.
        self.cameras = tuple(sorted(assigned, key=lambda name: name is None))
        self.raw = one_size(dataset_info, self.cameras)
        self.default_domain = domain_number(data_config.domain, model_config.num_domains)
        self._check()

    def _check(self) -> None:
        model, space = self.model, self.model.space
        check_image_size(model.image_size, self.data.image_size)
        if self.action_dim > space.dim:
            raise UserError(
                f"The actions have {self.action_dim} dimensions, more than the {space.dim} of action space "
                f"'{model.action_mode}': choose another model.action_mode (auto takes any, up to model.max_action_dim)."
            )
        if any(term.kind == "bce" for term in space.terms) and self.data.normalization_mode != "identity":
            raise UserError(
                f"Action space '{model.action_mode}' reads the gripper as 0 or 1, which data.normalization_mode="
                f"{self.data.normalization_mode} changes: set it to identity, or choose model.action_mode=auto."
            )
        if model.use_proprio and not self.info.state_dim:
            raise UserError(
                "The dataset has no state: name its column with data.state_key, or set model.use_proprio=false."
            )
        if self.tokenizer.vocab_size > model.text.vocab_size or self.tokenizer.pad_id != model.text.pad_token:
            raise UserError(
                f"The tokenizer '{self.tokenizer.path}' has {self.tokenizer.vocab_size} entries and padding "
                f"{self.tokenizer.pad_id}, but model.text.vocab_size is {model.text.vocab_size} and "
                f"model.text.pad_token {model.text.pad_token}: give this model's tokenizer with --tokenizer-path."
            )

    def needs(self) -> DataNeeds:
        names = tuple(name for name in self.cameras if name is not None)
        return DataNeeds(action_offsets=tuple(range(self.model.action_horizon)), cameras=names)

    def sample(self, sample: Sample, rng: np.random.Generator, training: bool) -> dict[str, np.ndarray]:
        """One sample → fields without the batch axis. Nothing is random."""
        actions_HA, mask_HA = self.codec.encode(sample)
        if self.data.pad_actions == "train":
            mask_HA = np.ones_like(mask_HA)
        return {**self.observe(sample), "actions": actions_HA, "action_mask": mask_HA}

    def observe(self, obs: Sample) -> dict[str, np.ndarray]:
        """What `act` needs. A camera missing from `obs` is masked."""
        frames = frames_of(obs, self.cameras)
        size = (self.model.image_size, self.model.image_size)
        return {
            "images": stack_views(frames, size, self._resized, self.raw),
            "image_mask": np.array([frame is not None for frame in frames]),
            "tokens": self._tokens(str(obs.get(TASK, ""))),
            "state": self.codec.state(obs) if self.model.use_proprio else np.zeros(0, np.float32),
            "embodiment": np.array(self.domain(obs), np.int64),
        }

    def actions(self, x_HA: np.ndarray, sample: Mapping[str, Any] | None = None) -> np.ndarray:
        """Model output [..., H, A] → robot units [..., H, the robot's dimensions], float32."""
        return self.codec.decode(np.asarray(x_HA, np.float32)[..., : self.action_dim], sample)

    def domain(self, obs: Mapping[str, Any]) -> int:
        """The number of the robot's soft prompt: as set, else by embodiment or robot type, else 0."""
        if self.default_domain is not None:
            return self.default_domain
        robot = obs.get("embodiment") or self.info.robot_type
        named = domain_number(robot, self.model.num_domains, strict=False)
        return 0 if named is None else named

    def embodiment_of(self, name: str) -> int:
        """The number of what a sample names; "" for nothing."""
        return self.domain({"embodiment": name})

    @property
    def notes(self) -> list[str]:
        """What a run should say of the robot."""
        robot = self.info.robot_type
        known = robot is None or domain_number(robot, self.model.num_domains, strict=False) is not None
        if self.default_domain is not None or known:
            return []
        return [f"Robot type '{robot}' has no soft prompt of its own: domain 0 is used; data.domain chooses another."]

    def _tokens(self, text: str) -> np.ndarray:
        """int64 [L]; a text that is too long keeps its end mark."""
        ids, length = self.tokenizer.ids(text), self.model.max_token_len
        if len(ids) > length:
            if length <= len(self.tokenizer.ids("")):
                raise UserError(f"model.max_token_len is {length}, which has no room for a word: raise it.")
            self.room.tell(len(ids), text)
            ids = [*ids[: length - 1], ids[-1]]
        return np.array([*ids, *[self.tokenizer.pad_id] * (length - len(ids))], np.int64)

    def prompt_length(self, task: str) -> int:
        """Tokens of the task, uncut."""
        return len(self.tokenizer.ids(task))

    def _resized(self, frame: np.ndarray) -> np.ndarray:
        """uint8 [S, S, 3], where cameras of several sizes cannot travel raw: as the device does it, then rounded."""
        size, fit = (self.model.image_size, self.model.image_size), self.model.image_resize
        prepare = NormalizeImages(size, fit=fit)
        x_CHW = prepare(torch.from_numpy(np.ascontiguousarray(frame))[None, None])[0]
        x_CHW = x_CHW * prepare.std_C11 + prepare.mean_C11
        return (x_CHW.permute(1, 2, 0) * 255.0).round().clamp(0, 255).to(torch.uint8).numpy()
