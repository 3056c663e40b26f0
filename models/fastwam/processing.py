"""A recorded sample → FastWAM's batch fields, and its actions back to robot units.

Facts: FastWAM's ``robot_video_dataset.py`` and ``fastwam_processor.py`` @ 45d8e14.

Axes: V cameras, T video frames, H action steps, A action dimensions of the model, L text tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from vlaforge.data.cache import CacheSpec, FeatureCache, open_caches, sampled_hash
from vlaforge.data.codec import ActionCodec, pad_last
from vlaforge.data.dataset import Dataset, DatasetInfo
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.normalize import NormalizerSet
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, IMAGES, STATE, TASK, DataNeeds, Sample
from vlaforge.data.tokenizer import Room, Tokenizer
from vlaforge.models.fastwam.config import DataConfig, ModelConfig
from vlaforge.models.fastwam.text_cache import OfficialTextCache
from vlaforge.models.video.canvas import compose, slots
from vlaforge.models.video.frozen import FrozenEncoder
from vlaforge.models.video.text import Umt5, clean_prompt
from vlaforge.models.video.vae import WanVae


class Processing:
    """Args:
    normalizers: entries ``action`` and, with a state input, ``state``.
    tokenizer: of UMT5; None with `text_source` ``context``.
    dataset_info: of the dataset that samples or observations come from.

    Raises UserError where data, caches and model do not fit.
    """

    tokenizer_options: ClassVar[dict[str, Any]] = {"bos": False, "eos": True, "pad_id": 0}

    def __init__(
        self,
        model_config: ModelConfig,
        data_config: DataConfig,
        normalizers: NormalizerSet,
        tokenizer: Tokenizer | None,
        dataset_info: DatasetInfo,
    ):
        self.model, self.data, self.info, self.tokenizer = model_config, data_config, dataset_info, tokenizer
        self.codec = ActionCodec(data_config, normalizers, model_config.max_action_dim, model_config.max_state_dim)
        self.cameras = assign_cameras(data_config, dataset_info)
        slots(model_config.layout, len(self.cameras), model_config.height, model_config.width)
        self._check()
        reads_text = self.tokenizer_needed(model_config)
        self.room = Room(model_config.text_tokens, "model.text_tokens") if reads_text else None
        self.caches: list[FeatureCache] = []
        self.official_text = self._official_text()
        if self.reads_cache:
            self.caches = open_caches(data_config.cache, self.cache_spec(), self._cached_fields())

    @staticmethod
    def encoding_configs(model: ModelConfig, data: DataConfig) -> tuple[ModelConfig, DataConfig]:
        """The configurations with which a batch holds what the encoders read."""
        return replace(model, video_source="pixels", text_source="tokens"), replace(data, cache="", text_cache="")

    @staticmethod
    def cache_words(folder: Path, fields: Iterable[str]) -> str:
        """What to add to a command line to train from a cache."""
        words = {"latents": "model.video_source=latents", "context": "model.text_source=context"}
        return " ".join([*(words[name] for name in fields if name in words), f"data.cache={folder}"])

    @staticmethod
    def tokenizer_needed(model_config: ModelConfig) -> bool:
        """Text from a cache needs no tokenizer."""
        return model_config.text_source == "tokens"

    def _check(self) -> None:
        model, data = self.model, self.data
        if model.video_source == "pixels":
            WanVae(model.vae).check()
        if model.text_source == "tokens":
            Umt5(model.text).check()
        vocabulary = self.tokenizer.vocab_size if self.tokenizer and self.tokenizer_needed(model) else 0
        if vocabulary > model.text.vocab:
            raise UserError(
                f"The tokenizer '{self.tokenizer.path}' has {vocabulary} entries, but model.text.vocab is "
                f"{model.text.vocab}: give UMT5's tokenizer with --tokenizer-path."
            )
        if model.max_state_dim and not self.info.state_dim:
            raise UserError(
                "The dataset has no state: name its column with data.state_key, or set model.max_state_dim=0."
            )
        if any(dim >= self.info.action_dim for dim in data.delta_dims):
            most = max(data.delta_dims)
            raise UserError(f"data.delta_dims names dimension {most}; the actions have {self.info.action_dim}.")
        if "{task}" not in data.prompt:
            raise UserError(f"data.prompt is {data.prompt!r}: it must hold {{task}}.")
        if self._cached_fields() and not (data.cache or (data.text_cache and model.video_source == "pixels")):
            raise UserError(
                f"model.video_source is {model.video_source} and model.text_source is {model.text_source}, but no "
                f"cache is given: write one with `forge-data precompute --model fastwam` and name it with data.cache."
            )
        if data.cache and not self._cached_fields():
            raise UserError(
                "data.cache is given, but the model reads pixels and tokens: set model.video_source=latents and "
                "model.text_source=context."
            )

    # ------------------------------------------------------------------------------------------------ caches

    def _cached_fields(self) -> tuple[str, ...]:
        video = ("latents", "frame_mask") if self.model.video_source == "latents" else ()
        return (*video, "context") if self.model.text_source == "context" else video

    @property
    def reads_cache(self) -> bool:
        return bool(self.data.cache and self._cached_fields())

    def _official_text(self) -> OfficialTextCache | None:
        if self.model.text_source != "context" or not self.data.text_cache:
            return None
        return OfficialTextCache(self.data.text_cache, self.model.text_tokens, self.model.text_dim)

    def cache_spec(self) -> CacheSpec:
        """What a cache of this model's encoders holds, and everything that decides its content."""
        model = self.model
        frames = list(self.needs_frames())
        video = {
            "cameras": list(self.cameras),
            "layout": model.layout,
            "size": [model.height, model.width],
            "frame_offsets": frames,
            "vae": model.vae.sizes(),
            "weights": _weights(WanVae(model.vae)),
            "dtype": model.encoded_dtype,
        }
        text = {
            "prompt": self.data.prompt,
            "tokens": model.text_tokens,
            "tokenizer": None if self.tokenizer is None else sampled_hash(self.tokenizer.path),
            "encoder": model.text.sizes(),
            "weights": _weights(Umt5(model.text)),
            "dtype": model.encoded_dtype,
        }
        return CacheSpec(
            rows={"latents": ("images",), "frame_mask": ()},
            texts={"context": ("tokens", "token_mask")},
            identity={"latents": video, "frame_mask": {"frame_offsets": frames}, "context": text},
            dtype=model.encoded_dtype,
        )

    def bind(self, dataset: Dataset) -> None:
        """Checks that the caches belong to `dataset`, before training. UserError when they do not."""
        if not self.caches:
            return
        parts = [part.dataset for part in getattr(dataset, "parts", ())] or [dataset]
        if len(parts) != len(self.caches):
            raise UserError(f"data.cache names {len(self.caches)} caches for {len(parts)} datasets: give one for each.")
        for cache, part in zip(self.caches, parts):
            cache.bind(part)

    # ------------------------------------------------------------------------------------------------ samples

    def needs_frames(self) -> tuple[int, ...]:
        return tuple(frame * self.model.frame_stride for frame in range(self.model.video_frames))

    def needs(self) -> DataNeeds:
        """Actions of the whole horizon, the video frames among them; no camera where latents come from a cache."""
        return DataNeeds(
            action_offsets=tuple(range(self.model.action_horizon)),
            image_offsets=self.needs_frames(),
            cameras=self.cameras if self.model.video_source == "pixels" else (),
        )

    def sample(self, sample: Sample, rng: np.random.Generator, training: bool) -> dict[str, np.ndarray]:
        """One sample → fields without the batch axis. Nothing is random: latents can be cached."""
        fields = self._text(sample)
        if self.model.video_source == "pixels":
            fields["images"] = self._frames([_frames_of(sample, name) for name in self.cameras])
            fields["frame_mask"] = ~np.asarray(sample[f"{IMAGES}{self.cameras[0]}_is_pad"], bool)
        else:
            cache, row = self._cache(sample), int(sample["index"])
            fields |= {name: cache.row(name, row) for name in ("latents", "frame_mask")}
        if self.model.max_state_dim:
            fields["state"] = self._state(sample)
        pad = np.asarray(sample[ACTION_IS_PAD], bool)
        action = np.array(sample[ACTION], np.float32)
        if self.data.delta_dims:
            action[np.ix_(pad, list(self.data.delta_dims))] = 0.0
        actions, mask = self.codec.encode({**sample, ACTION: action})
        actions = self._clip(actions)
        return {**fields, "actions": actions, "action_mask": mask, "action_fill": actions}

    def observe(self, obs: Sample) -> dict[str, np.ndarray]:
        """What `act` needs, from the last frame of each camera; it stands at all places of the video."""
        still = [_frames_of(obs, name) for name in self.cameras]
        still = [frame[-1] if frame.ndim == 4 else frame for frame in still]
        frames = [np.broadcast_to(frame, (self.model.video_frames, *frame.shape)) for frame in still]
        fields = {**self._text(obs), "images": self._frames(frames)}
        if self.model.max_state_dim:
            fields["state"] = self._state(obs)
        return fields

    def actions(self, x_HA: np.ndarray, sample: Mapping[str, Any] | None = None) -> np.ndarray:
        """Normalised model output [H, A] → robot units [H, the robot's dimensions], float32."""
        return self.codec.decode(x_HA, sample)

    def prompt(self, task: str) -> str:
        """The text that is encoded; a task that is a prompt already stays as it is."""
        start = self.data.prompt.split("{task}")[0]
        return task if start and task.startswith(start) else self.data.prompt.format(task=task)

    def tokens(self, prompt: str) -> dict[str, np.ndarray]:
        """`tokens` int64 [L] and `token_mask` bool [L] of a prompt."""
        text = clean_prompt(prompt)
        ids, mask = self.tokenizer.encode(text, self.model.text_tokens)
        if mask.all() and not self.room.said:
            self.room.tell(len(self.tokenizer.ids(text)), text)
        return {"tokens": ids, "token_mask": mask}

    def prompt_length(self, task: str) -> int:
        """Tokens of the task's prompt, uncut."""
        return len(self.tokenizer.ids(clean_prompt(self.prompt(task))))

    def _text(self, sample: Sample) -> dict[str, np.ndarray]:
        prompt = self.prompt(str(sample.get(TASK, "")))
        if self.model.text_source == "tokens":
            return self.tokens(prompt)
        context, mask = (self.official_text or self._cache(sample)).text("context", prompt)
        return {"context": context, "token_mask": mask}

    def _cache(self, sample: Sample) -> FeatureCache:
        return self.caches[int(sample.get("dataset_index", 0)) if len(self.caches) > 1 else 0]

    def _state(self, sample: Sample) -> np.ndarray:
        state = np.asarray(sample[STATE], np.float32)
        state = state[-1] if state.ndim == 2 else state
        return pad_last(self._clip(self.codec.state({**sample, STATE: state})), self.model.max_state_dim, "state")

    def _clip(self, values: np.ndarray) -> np.ndarray:
        clip = self.data.clip
        return values if clip is None else np.clip(values, -clip, clip).astype(np.float32)

    def _frames(self, cameras: list[np.ndarray]) -> np.ndarray:
        """uint8 [V, T, h, w, 3] as recorded; cameras of different sizes are put on the canvas here, [1, T, H, W, 3]."""
        model = self.model
        if len({camera.shape for camera in cameras}) == 1:
            return np.stack(cameras)
        return join_on_canvas(cameras, model.layout, model.height, model.width)


def join_on_canvas(cameras: list[np.ndarray], layout: str, height: int, width: int) -> np.ndarray:
    """Cameras uint8 [T, h, w, 3] of any sizes → the canvas, uint8 [1, T, height, width, 3] (rounded once)."""
    out = np.empty((1, cameras[0].shape[0], height, width, 3), np.uint8)
    for frames, slot in zip(cameras, slots(layout, len(cameras), height, width)):
        one = compose(torch.from_numpy(np.ascontiguousarray(frames))[None, None], "row", slot.height, slot.width)
        pixels = ((one[0] + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0)
        out[0, :, slot.top : slot.top + slot.height, slot.left : slot.left + slot.width] = pixels.numpy()
    return out


def _frames_of(sample: Sample, camera: str) -> np.ndarray:
    if IMAGES + camera not in sample:
        raise UserError(
            f"The sample has no camera '{camera}', which the canvas needs: choose others with data.cameras."
        )
    return np.asarray(sample[IMAGES + camera])


def _weights(encoder: FrozenEncoder) -> dict[str, Any] | None:
    """What tells two sets of weights apart; None when this machine has neither a file nor a seed."""
    if encoder.path:
        return {"file": encoder.file().name, "sample_sha256": sampled_hash(encoder.file())}
    return None if encoder.seed is None else {"seed": encoder.seed}


def assign_cameras(data: DataConfig, info: DatasetInfo) -> tuple[str, ...]:
    """Dataset cameras in the canvas's order: those of `data.cameras` as written, else all by name."""
    for camera in data.cameras.values():
        if camera not in info.cameras:
            raise unknown("camera", camera, info.cameras)
    cameras = tuple(data.cameras.values()) or tuple(sorted(info.cameras))
    if not cameras:
        raise UserError("FastWAM needs at least one camera, and the dataset has none.")
    return cameras
