"""Camera frames to model input in one pass: resize, pad, crop, rotate, colour, range and cast.

    out(o) = colour(bilinear(frame / 255, s(o))) · gain + bias inside the image, `pad` outside
    s(o) = M (o + ½ - p) + q - ½

Each image has a placement of 16 numbers: the matrix M (xx, xy, yx, yy), p (x, y), q (x, y), the rectangle of the source
that may be seen (left, top, right, bottom), and colour (brightness, contrast, its pivot, saturation). This is the
placement of `vlaforge.data.images`; a test holds both together. Without placements the frames are resized with their
aspect kept (bilinear, half-pixel centres, no antialiasing) and centred on padding, the odd pixel right and below: the
float path of LeRobot's π0.5. There is no gradient.

Axes: N images, H W pixels of the frame, C = 3 channels, h w pixels of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import cdiv, launch, op
from vlaforge.kernels.spec import YES, Case, Decision, KernelSpec, dispatch

PLACEMENT = 16
HALF = (0.5, 0.5, 0.5)


def centred(source: tuple[int, int], size: tuple[int, int]) -> tuple[float, ...]:
    """The placement that fits a frame of `source` (height, width) into `size`, centred, aspect kept."""
    (height, width), (out_h, out_w) = source, size
    ratio = max(width / out_w, height / out_h)
    inner_h, inner_w = max(1, int(height / ratio)), max(1, int(width / ratio))
    before = ((out_w - inner_w) // 2, (out_h - inner_h) // 2)
    return (
        *(width / inner_w, 0.0, 0.0, height / inner_h),
        *(float(before[0]), float(before[1]), 0.0, 0.0),
        *(0.0, 0.0, float(width), float(height)),
        *(1.0, 1.0, 0.5, 1.0),
    )


def reference(
    frames: Tensor,
    size: tuple[int, int],
    placements: Tensor | None = None,
    *,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    pad: float = -1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The formula in plain torch."""
    n, _, width, _ = frames.shape
    mxx, mxy, myx, myy, px, py, qx, qy, left, top, right, bottom, *colour = (
        column[:, None, None] for column in _placements(frames, size, placements).unbind(1)
    )
    x = torch.arange(size[1], device=frames.device, dtype=torch.float32) + 0.5 - px
    y = torch.arange(size[0], device=frames.device, dtype=torch.float32)[:, None] + 0.5 - py
    sx, sy = mxx * x + mxy * y + (qx - 0.5), myx * x + myy * y + (qy - 0.5)
    inside = (sx >= left - 0.5) & (sx < right - 0.5) & (sy >= top - 0.5) & (sy < bottom - 0.5)
    x_low, x_high = left.ceil(), right.floor() - 1
    y_low, y_high = top.ceil(), bottom.floor() - 1
    sx, sy = sx.clamp(x_low, x_high), sy.clamp(y_low, y_high)
    x0, y0 = sx.floor(), sy.floor()
    x1, y1 = torch.minimum(x0 + 1, x_high), torch.minimum(y0 + 1, y_high)
    flat, image = frames.reshape(n, -1, 3), torch.arange(n, device=frames.device)[:, None, None]

    def tap(row: Tensor, column: Tensor) -> Tensor:
        return flat[image, (row * width + column).long()].float() / 255.0

    fx, fy = (sx - x0).unsqueeze(-1), (sy - y0).unsqueeze(-1)
    upper = tap(y0, x0) * (1 - fx) + tap(y0, x1) * fx
    lower = tap(y1, x0) * (1 - fx) + tap(y1, x1) * fx
    v = upper * (1 - fy) + lower * fy
    brightness, contrast, pivot, saturation = (c.unsqueeze(-1) for c in colour)
    v = v * brightness
    v = v + (pivot - v) * (1 - contrast)
    v = v + (v.mean(-1, keepdim=True) - v) * (1 - saturation)
    gain, bias = (v.new_tensor(numbers) for numbers in _range(mean, std))
    out = torch.where(inside.unsqueeze(-1), v.clamp(0.0, 1.0) * gain + bias, pad)
    return out.permute(0, 3, 1, 2).to(dtype)


def _placements(frames: Tensor, size: tuple[int, int], placements: Tensor | None) -> Tensor:
    if placements is not None:
        return placements.float()
    row = torch.tensor(centred(tuple(frames.shape[1:3]), size), dtype=torch.float32, device=frames.device)
    return row.expand(frames.shape[0], -1)


def _range(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """(gain, bias) of each channel: (v - mean) / std = v · gain + bias."""
    return [1.0 / s for s in std], [-m / s for m, s in zip(mean, std, strict=True)]


# ---- kernel


@triton.jit
def _geometry(p, x, y, xx, yy, px, py, source_w, source_h):
    """(source x, source y, left, top, right, bottom) of output pixels: by the placement at p, or a plain resize."""
    if p is not None:
        x, y = x - tl.load(p + 4), y - tl.load(p + 5)
        sx = tl.load(p) * x + tl.load(p + 1) * y + (tl.load(p + 6) - 0.5)
        sy = tl.load(p + 2) * x + tl.load(p + 3) * y + (tl.load(p + 7) - 0.5)
        left, top, right, bottom = tl.load(p + 8), tl.load(p + 9), tl.load(p + 10), tl.load(p + 11)
    else:
        sx = tl.cast(xx, tl.float32) * (x - tl.cast(px, tl.float32)) - 0.5
        sy = tl.cast(yy, tl.float32) * (y - tl.cast(py, tl.float32)) - 0.5
        left, top = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32)
        right, bottom = tl.cast(source_w, tl.float32), tl.cast(source_h, tl.float32)
    return sx, sy, left, top, right, bottom


@triton.jit
def _kernel(
    frames_ptr, place_ptr, out_ptr, height, width, place_stride, frame_n, frame_y, frame_x, frame_c,
    xx, yy, px, py, source_w, source_h, pad, gain0, gain1, gain2, bias0, bias1, bias2, WIDTH: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    keep = pixel < height * width
    x, y = (pixel % width).to(tl.float32) + 0.5, (pixel // width).to(tl.float32) + 0.5
    p = place_ptr
    if place_ptr is not None:
        p += image * place_stride
    sx, sy, left, top, right, bottom = _geometry(p, x, y, xx, yy, px, py, source_w, source_h)
    inside = (sx >= left - 0.5) & (sx < right - 0.5) & (sy >= top - 0.5) & (sy < bottom - 0.5)
    x_high, y_high = tl.floor(right) - 1.0, tl.floor(bottom) - 1.0
    sx = tl.minimum(tl.maximum(sx, tl.ceil(left)), x_high)
    sy = tl.minimum(tl.maximum(sy, tl.ceil(top)), y_high)
    x0, y0 = tl.floor(sx), tl.floor(sy)
    fx, fy = sx - x0, sy - y0
    x1, y1 = tl.minimum(x0 + 1.0, x_high).to(tl.int32), tl.minimum(y0 + 1.0, y_high).to(tl.int32)
    x0, y0 = x0.to(tl.int32), y0.to(tl.int32)
    # The three channels of a pixel lie side by side, so the later ones come out of the cache.
    base = frames_ptr + image * frame_n
    r = _bilinear(base, x0, x1, y0, y1, fx, fy, frame_y, frame_x, keep)
    g = _bilinear(base + frame_c, x0, x1, y0, y1, fx, fy, frame_y, frame_x, keep)
    b = _bilinear(base + 2 * frame_c, x0, x1, y0, y1, fx, fy, frame_y, frame_x, keep)
    if place_ptr is not None:
        r, g, b = _colour(r, g, b, tl.load(p + 12), tl.load(p + 13), tl.load(p + 14), tl.load(p + 15))
    plane = height * width
    out = out_ptr + image * 3 * plane + pixel
    _store(out, r, gain0, bias0, inside, pad, keep)
    _store(out + plane, g, gain1, bias1, inside, pad, keep)
    _store(out + 2 * plane, b, gain2, bias2, inside, pad, keep)


@triton.jit
def _tap(frame_ptr, y, x, frame_y, frame_x, keep):
    return tl.load(frame_ptr + y * frame_y + x * frame_x, mask=keep, other=0).to(tl.float32) / 255.0


@triton.jit
def _bilinear(base, x0, x1, y0, y1, fx, fy, frame_y, frame_x, keep):
    upper = _tap(base, y0, x0, frame_y, frame_x, keep) * (1.0 - fx)
    upper += _tap(base, y0, x1, frame_y, frame_x, keep) * fx
    lower = _tap(base, y1, x0, frame_y, frame_x, keep) * (1.0 - fx)
    lower += _tap(base, y1, x1, frame_y, frame_x, keep) * fx
    return upper * (1.0 - fy) + lower * fy


@triton.jit
def _colour(r, g, b, brightness, contrast, pivot, saturation):
    r, g, b = r * brightness, g * brightness, b * brightness
    r += (pivot - r) * (1.0 - contrast)
    g += (pivot - g) * (1.0 - contrast)
    b += (pivot - b) * (1.0 - contrast)
    grey = (r + g + b) / 3.0
    turned = 1.0 - saturation
    return r + (grey - r) * turned, g + (grey - g) * turned, b + (grey - b) * turned


@triton.jit
def _store(out, v, gain, bias, inside, pad, keep):
    v = tl.minimum(tl.maximum(v, 0.0), 1.0) * tl.cast(gain, tl.float32) + tl.cast(bias, tl.float32)
    tl.store(out, tl.where(inside, v, tl.cast(pad, tl.float32)).to(out.dtype.element_ty), mask=keep)


# ---- launcher and registration


def _fake(frames, placements, height, width, gain, bias, pad, dtype):
    return frames.new_empty((frames.shape[0], 3, height, width), dtype=dtype)


@op("image_prep", _fake)
def _forward(
    frames: Tensor,
    placements: Tensor | None,
    height: int,
    width: int,
    gain: list[float],
    bias: list[float],
    pad: float,
    dtype: torch.dtype,
) -> Tensor:
    out = _fake(frames, placements, height, width, gain, bias, pad, dtype)
    placements = placements if placements is None else placements.contiguous()
    xx, _, _, yy, px, py, *_, source_w, source_h = centred(tuple(frames.shape[1:3]), (height, width))[:12]
    n, y, x, c = frames.stride()
    launch(
        _kernel, (cdiv(height * width, 256), frames.shape[0]), frames, placements, out, height, width,
        PLACEMENT, n, y, x, c, xx, yy, px, py, source_w, source_h, pad, *gain, *bias, WIDTH=256, num_warps=4,
    )  # fmt: skip
    return out


# ---- public


def supports(frames: Tensor, *_, **__) -> Decision:
    """uint8 or fp32 frames with values of 0 to 255."""
    if frames.dtype not in (torch.uint8, torch.float32):
        return Decision(False, f"image_prep takes uint8 or fp32 frames, not {frames.dtype}")
    return YES


def image_prep(
    frames: Tensor,
    size: tuple[int, int],
    placements: Tensor | None = None,
    *,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    pad: float = -1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`frames` [N, H, W, 3] of 0 to 255 (uint8 or fp32, any strides) → [N, 3, *size] of `dtype`.

    Args:
        size: (height, width) of the output.
        placements: fp32 [N, 16], see the module; by default resize with the aspect kept, centred on padding.
        mean, std: of each channel, in the range 0 to 1; the default gives [-1, 1].
        pad: value of the padding in the output.

    Raises:
        ValueError: frames or placements of another shape.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"image_prep takes frames [N, H, W, 3], not {list(frames.shape)}")
    if placements is not None and tuple(placements.shape) != (frames.shape[0], PLACEMENT):
        raise ValueError(f"placements are [{frames.shape[0]}, {PLACEMENT}], not {list(placements.shape)}")
    if not dispatch("image_prep", frames, supports(frames)):
        return reference(frames, size, placements, mean=mean, std=std, pad=pad, dtype=dtype)
    gain, bias = _range(mean, std)
    placements = placements if placements is None else placements.float()
    return _forward(frames, placements, *size, gain, bias, float(pad), dtype)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    n, height, width = (case.sizes[axis] for axis in ("N", "H", "W"))
    size = case.sizes["h"], case.sizes["w"]
    frames = torch.randint(256, (n, height, width, 3), device=device, generator=generator, dtype=torch.uint8)
    inputs = {"frames": frames, "size": size, "dtype": dtype}
    if case.sizes.get("augmented"):
        place = torch.tensor(centred((height, width), size), device=device).repeat(n, 1)
        jitter = torch.rand(n, PLACEMENT, device=device, generator=generator) - 0.5
        scale = torch.tensor([0.1] * 4 + [3.0] * 4 + [0.0] * 4 + [0.5] * 4, device=device)
        inputs["placements"] = place + jitter * scale
    return inputs | {name: case.sizes[name] for name in ("mean", "std", "pad") if name in case.sizes}


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "pad": 0.0}

KERNEL = KernelSpec(
    name="image_prep",
    formula="colour(bilinear(frame / 255, place)) · gain + bias, padded",
    op=image_prep,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    caps={"N": 2, "h": 50, "w": 50},
    tolerances={torch.float32: 2e-4, torch.bfloat16: 1.6e-2},
    cases=(
        Case("pi05, two views of 480 x 640", {"N": 64, "H": 480, "W": 640, "h": 224, "w": 224}),
        Case("pi05, augmented", {"N": 64, "H": 480, "W": 640, "h": 224, "w": 224, "augmented": True}),
        Case("x-vla, imagenet range", {"N": 96, "H": 256, "W": 256, "h": 224, "w": 224, **IMAGENET}),
        Case("odd", {"N": 3, "H": 37, "W": 23, "h": 29, "w": 31}),
    ),
)
