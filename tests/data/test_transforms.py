"""Image paths against the published ones, and the fused pass against its parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlaforge.data.errors import UserError
from vlaforge.data.images import PARAMS, Placement, resize_with_pad, resize_with_pad_pil, sample_views, to_float
from vlaforge.data.schema import sample_rng
from vlaforge.data.transforms import CentreCrop, ColorJitter, Compose, RandomCrop, Resize, ResizeWithPad, Rotate

HERE = Path(__file__).parents[1] / "golden" / "pi05"
CASES = json.loads((HERE / "preproc.json").read_text())["cases"]
AUGMENT = Compose((RandomCrop(0.9), ResizeWithPad(48, 48), Rotate(5.0), ColorJitter(0.3, 0.4, 0.5)))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(HERE / "preproc.safetensors")


@pytest.fixture
def frames() -> np.ndarray:
    """Two smooth pictures uint8 [2, 60, 80, 3]."""
    y, x = np.mgrid[0:60, 0:80] / 80
    base = np.stack([x, y, (x + y) / 2], -1)
    return (np.stack([base, base[::-1]]) * 255).astype(np.uint8)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_published_resizes(golden, case):
    frame, size, name = golden[f"{case['name']}.uint8_hwc"], case["target"], case["name"]
    x = to_float(frame[None])
    lerobot = resize_with_pad(x, size, size)[0] * 2 - 1
    assert torch.equal(lerobot, golden[f"{name}.lerobot_model_input_chw"])
    openpi = resize_with_pad(x * 2 - 1, size, size, value=-1.0)[0].permute(1, 2, 0)
    torch.testing.assert_close(openpi, golden[f"{name}.openpi_float_path_hwc"], atol=3e-7, rtol=0)
    bytes_ = resize_with_pad(frame.permute(2, 0, 1)[None], size, size)[0].permute(1, 2, 0)
    assert torch.equal(bytes_, golden[f"{name}.openpi_uint8_path_hwc"])
    pil = resize_with_pad_pil(frame.numpy(), size, size)
    assert np.array_equal(pil, golden[f"{name}.openpi_pil_data_transform_hwc"].numpy())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_fused_pass_equals_the_plain_path(golden, case):
    frame, size = golden[f"{case['name']}.uint8_hwc"], case["target"]
    fused = Compose((ResizeWithPad(size, size),)).apply(frame[None].numpy())[0]
    torch.testing.assert_close(fused, golden[f"{case['name']}.lerobot_model_input_chw"], atol=3e-6, rtol=0)


def test_padding_at_left_and_top(frames):
    plain = resize_with_pad(to_float(torch.from_numpy(frames)), 64, 64, anchor="end")
    assert (plain[:, :, :16] == 0).all() and (plain[:, :, 16:, 1:] > 0).any()
    fused = Compose((ResizeWithPad(64, 64, anchor="end"),), low=0.0).apply(frames)
    torch.testing.assert_close(fused, plain, atol=2e-6, rtol=0)


def test_without_a_generator_random_steps_are_their_centre(frames):
    evaluation = AUGMENT.apply(frames)
    plain = Compose((CentreCrop(0.9), ResizeWithPad(48, 48))).apply(frames)
    assert torch.equal(evaluation, plain)
    cropped = to_float(torch.from_numpy(frames[:, 3:57, 4:76]))
    torch.testing.assert_close(plain, resize_with_pad(cropped, 48, 48) * 2 - 1, atol=3e-6, rtol=0)


def test_augmentation_is_a_function_of_the_samples_generator(frames):
    def rngs(epoch):
        return [sample_rng(3, epoch, 7, f"augment.{view}") for view in range(2)]

    once, again, other = AUGMENT.apply(frames, rngs(0)), AUGMENT.apply(frames, rngs(0)), AUGMENT.apply(frames, rngs(1))
    assert torch.equal(once, again) and not torch.equal(once, other)
    alone = AUGMENT.apply(frames[1:], rngs(0)[1:])
    assert torch.equal(alone[0], once[1])  # a batch's other samples change nothing


def test_parameters_travel_and_give_the_same_numbers(frames):
    rngs = [sample_rng(0, 0, i, "augment") for i in range(2)]
    params = AUGMENT.params(frames, rngs)
    assert params.shape == (2, len(PARAMS)) and params.dtype == np.float32
    device = sample_views(torch.from_numpy(frames), torch.from_numpy(params), (48, 48))
    rngs = [sample_rng(0, 0, i, "augment") for i in range(2)]
    assert torch.equal(device, AUGMENT.apply(frames, rngs))
    bf16 = sample_views(torch.from_numpy(frames), torch.from_numpy(params), (48, 48), dtype=torch.bfloat16)
    assert torch.equal(bf16, device.bfloat16())


def test_crop_then_resize_repeats_the_windows_border(frames):
    placement = Placement.whole(60, 80).crop(20, 10, 30, 40).resize(60, 80)
    got = sample_views(torch.from_numpy(frames[:1]), torch.from_numpy(placement.vector())[None], (60, 80), low=0.0)
    want = torch.nn.functional.interpolate(
        to_float(torch.from_numpy(frames[:1, 10:40, 20:60])), size=(60, 80), mode="bilinear"
    )
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


def test_rotation_turns_counter_clockwise_and_pads():
    frame = np.zeros((1, 41, 41, 3), np.uint8)
    frame[0, 20, 35] = 255  # right of the centre
    turned = Placement.whole(41, 41).rotate(90)
    out = sample_views(torch.from_numpy(frame), torch.from_numpy(turned.vector())[None], (41, 41), low=0.0)
    assert out[0, 0].argmax().item() == 5 * 41 + 20  # above it
    white = torch.full((1, 40, 40, 3), 255, dtype=torch.uint8)
    tilted = Placement.whole(40, 40).rotate(45).vector()
    out = sample_views(white, torch.from_numpy(tilted)[None], (40, 40))
    assert out[0, :, 0, 0].tolist() == [-1, -1, -1] and out[0, :, 20, 20].tolist() == [1, 1, 1]


def test_colour_factors(frames):
    def with_colour(*colour):
        placement = Placement((60, 80), (0, 0, 80, 60), colour=colour)
        return sample_views(
            torch.from_numpy(frames), torch.from_numpy(np.stack([placement.vector()] * 2)), (60, 80), low=0
        )

    x = to_float(torch.from_numpy(frames))
    assert torch.equal(with_colour(1, 1, 0.3, 1), x)
    torch.testing.assert_close(with_colour(0.5, 1, 0.3, 1), x * 0.5)
    torch.testing.assert_close(with_colour(1, 1.4, 0.3, 1), ((x - 0.3) * 1.4 + 0.3).clamp(0, 1), atol=1e-6, rtol=0)
    grey = x.mean(1, keepdim=True)
    torch.testing.assert_close(with_colour(1, 1, 0.3, 0.0), grey.expand_as(x), atol=1e-6, rtol=0)


def test_unapply_returns_the_picture(frames):
    for steps in ((ResizeWithPad(96, 96),), (Resize(120, 90),), (CentreCrop(0.8), ResizeWithPad(64, 64))):
        compose = Compose(steps)
        back = compose.unapply(compose.apply(frames)[0], (60, 80))
        inner = np.s_[8:-8, 10:-10] if len(steps) == 2 else np.s_[:]
        assert np.abs(back[inner].astype(int) - frames[0][inner]).max() <= 4
    assert (back[:4] == 0).all()  # what the crop cut off is gone
    with pytest.raises(UserError, match="size"):
        compose.unapply(torch.zeros(3, 10, 10), (60, 80))


def test_impossible_requests_are_said():
    with pytest.raises(ValueError, match="before rotating"):
        Placement.whole(10, 10).rotate(3).crop(1, 1, 4, 4)
    with pytest.raises(ValueError, match="leaves the image"):
        Placement.whole(10, 10).crop(8, 1, 4, 4)
    with pytest.raises(UserError, match="uint8"):
        sample_views(torch.zeros(1, 4, 4, 3, dtype=torch.int64), torch.zeros(1, 16), (4, 4))
