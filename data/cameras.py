"""Which of a dataset's cameras fills which of a model's slots: one rule for all families with camera slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vlaforge.data.dataset import DatasetInfo
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import IMAGES, Sample

SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""Names of the camera slots, in the model's order; a model with more continues with ``view_3``, ..."""


def slot_names(count: int) -> tuple[str, ...]:
    return SLOTS[:count] + tuple(f"view_{i}" for i in range(len(SLOTS), count))


def assign_cameras(
    chosen: Mapping[str, str], info: DatasetInfo, count: int, use: Sequence[bool] | None = None
) -> tuple[str | None, ...]:
    """The dataset's camera for each of `count` slots, None where the slot stays empty.

    Args:
        chosen: slot → camera (`data.cameras`). Empty: the cameras fill the slots in the dataset's order, and must all
            fit.
        use: which slots may be used, one bool each; None: all.

    Raises UserError for unknown slots and cameras, too many cameras, and when no camera is left.
    """
    slots = slot_names(count)
    for slot, camera in chosen.items():
        if slot not in slots:
            raise unknown("camera slot", slot, slots)
        if camera not in info.cameras:
            raise unknown("camera", camera, info.cameras)
    assigned: list[str | None]
    if chosen:
        assigned = [chosen.get(slot) for slot in slots]
    elif len(info.cameras) > count:
        raise UserError(
            f"The dataset has {len(info.cameras)} cameras ({', '.join(info.cameras)}) for {count} slots: choose them "
            f"with data.cameras.{slots[0]}=NAME and so on."
        )
    else:
        assigned = [*info.cameras, *[None] * (count - len(info.cameras))]
    if use is not None:
        if len(use) != count:
            raise UserError(f"data.image_mask has {len(use)} entries for {count} camera slots.")
        assigned = [name if used else None for name, used in zip(assigned, use)]
    if not any(assigned):
        raise UserError("No camera is left for the model: the dataset has none, or data.image_mask hides all.")
    return tuple(assigned)


def check_image_size(model: int, data: int) -> None:
    """UserError when `model.image_size` and `data.image_size` differ."""
    if data != model:
        raise UserError(f"data.image_size is {data}, but model.image_size is {model}: set both alike.")


def one_size(info: DatasetInfo, cameras: Sequence[str | None]) -> bool:
    """Whether all assigned cameras record frames of one size, so that they can travel as they are."""
    used = [info.cameras[name] for name in cameras if name is not None]
    return len({(camera.height, camera.width) for camera in used}) == 1


def frames_of(obs: Sample, cameras: Sequence[str | None]) -> list[np.ndarray | None]:
    """Each slot's frame uint8 [h, w, 3], None where it is empty or `obs` lacks the camera. UserError without any."""
    frames = [None if name is None else obs.get(f"{IMAGES}{name}") for name in cameras]
    if all(frame is None for frame in frames):
        raise UserError(f"The observation has none of the cameras {[name for name in cameras if name]}.")
    return frames


def stack_views(
    frames: Sequence[np.ndarray | None], size: tuple[int, int], resize: Callable[[np.ndarray], np.ndarray], raw: bool
) -> np.ndarray:
    """uint8 [V, h, w, 3]; absent views are black. With `raw`, frames of one size stay as they are; else `resize`
    makes each [*size, 3]."""
    shapes = {frame.shape for frame in frames if frame is not None}
    raw = raw and len(shapes) == 1
    out = np.zeros((len(frames), *(shapes.pop() if raw else (*size, 3))), np.uint8)
    for view, frame in enumerate(frames):
        if frame is not None:
            out[view] = frame if raw else resize(frame)
    return out
