"""Flow matching's input and target in one pass.

    towards "noise":  x_t = t · noise + (1 - t) · x,   target = noise - x     (π0.5, Wan models)
    towards "data":   x_t = (1 - t) · noise + t · x,   target = x - noise     (GR00T)

The time is one a sample, frame or token (see `scalars`). fp32 inside. Times get no gradient.

Backward, for "noise":  dx = (1 - t) · dx_t - dtarget,  dnoise = t · dx_t + dtarget.

Axes: B samples; the rest is whatever x has.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import FLAT, cdiv, launch, op
from vlaforge.kernels.scalars import value_of, values
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch

Towards = Literal["noise", "data"]


def reference(
    x: Tensor, noise: Tensor, time: Tensor, *, towards: Towards = "noise", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The formula in plain torch."""
    t, wide, eps = values(time, x).view.float(), x.float(), noise.float()
    if towards == "noise":
        mixed, target = t * eps + (1.0 - t) * wide, eps - wide
    else:
        mixed, target = (1.0 - t) * eps + t * wide, wide - eps
    return mixed.to(dtype or x.dtype), target.to(x.dtype)


# ---- kernels


@triton.jit
def _kernel(
    x_ptr, noise_ptr, time_ptr, mixed_ptr, target_ptr, per_sample, count, inner,
    WIDTH: tl.constexpr, TO_DATA: tl.constexpr,
):  # fmt: skip
    sample, element = tl.program_id(1), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    keep = element < per_sample
    at = sample.to(tl.int64) * per_sample + element
    x = tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32)
    noise = tl.load(noise_ptr + at, mask=keep, other=0.0).to(tl.float32)
    t = tl.load(time_ptr + value_of(sample, element, count, inner), mask=keep, other=0.0).to(tl.float32)
    if TO_DATA:
        mixed, target = (1.0 - t) * noise + t * x, x - noise
    else:
        mixed, target = t * noise + (1.0 - t) * x, noise - x
    tl.store(mixed_ptr + at, mixed.to(mixed_ptr.dtype.element_ty), mask=keep)
    tl.store(target_ptr + at, target.to(target_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _backward_kernel(
    dmixed_ptr, dtarget_ptr, time_ptr, dx_ptr, dnoise_ptr, per_sample, count, inner,
    WIDTH: tl.constexpr, TO_DATA: tl.constexpr,
):  # fmt: skip
    sample, element = tl.program_id(1), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    keep = element < per_sample
    at = sample.to(tl.int64) * per_sample + element
    dmixed = tl.load(dmixed_ptr + at, mask=keep, other=0.0).to(tl.float32)
    dtarget = tl.load(dtarget_ptr + at, mask=keep, other=0.0).to(tl.float32)
    t = tl.load(time_ptr + value_of(sample, element, count, inner), mask=keep, other=0.0).to(tl.float32)
    if TO_DATA:
        t, dtarget = 1.0 - t, -dtarget
    dx, dnoise = (1.0 - t) * dmixed - dtarget, t * dmixed + dtarget
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=keep)
    tl.store(dnoise_ptr + at, dnoise.to(dnoise_ptr.dtype.element_ty), mask=keep)


# ---- launchers and registration


def _forward_fake(x, noise, time, count, inner, to_data, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape)


@op("flow_mix", _forward_fake)
def _forward(
    x: Tensor, noise: Tensor, time: Tensor, count: int, inner: int, to_data: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    x, noise, time = x.contiguous(), noise.contiguous(), time.contiguous()
    mixed, target = _forward_fake(x, noise, time, count, inner, to_data, dtype)
    each = x.shape[1:].numel()
    launch(
        _kernel, (cdiv(each, FLAT.width), x.shape[0]), x, noise, time, mixed, target, each, count, inner,
        WIDTH=FLAT.width, TO_DATA=to_data, num_warps=FLAT.num_warps,
    )  # fmt: skip
    return mixed, target


def _backward_fake(dmixed, dtarget, time, count, inner, to_data):
    return dtarget.new_empty(dtarget.shape), dtarget.new_empty(dtarget.shape)


@op("flow_mix_backward", _backward_fake)
def _backward(
    dmixed: Tensor, dtarget: Tensor, time: Tensor, count: int, inner: int, to_data: bool
) -> tuple[Tensor, Tensor]:
    dmixed, dtarget, time = dmixed.contiguous(), dtarget.contiguous(), time.contiguous()
    dx, dnoise = _backward_fake(dmixed, dtarget, time, count, inner, to_data)
    each = dx.shape[1:].numel()
    launch(
        _backward_kernel, (cdiv(each, FLAT.width), dx.shape[0]), dmixed, dtarget, time, dx, dnoise, each, count, inner,
        WIDTH=FLAT.width, TO_DATA=to_data, num_warps=FLAT.num_warps,
    )  # fmt: skip
    return dx, dnoise


def _save(ctx, inputs, output):
    _, noise, time, *ctx.options, _ = inputs
    ctx.noise_dtype = noise.dtype
    ctx.save_for_backward(time)


def _gradients(ctx, dmixed, dtarget):
    dx, dnoise = _backward(dmixed, dtarget, *ctx.saved_tensors, *ctx.options)
    return dx, dnoise.to(ctx.noise_dtype), None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(x: Tensor, noise: Tensor, time: Tensor, **_) -> Decision:
    """fp32 / bf16 / fp16 of equal shapes, times without a gradient."""
    for name, tensor in (("x", x), ("noise", noise), ("time", time)):
        if tensor.dtype not in FLOATS:
            return Decision(False, f"flow_mix takes fp32, bf16 or fp16, and {name} is {tensor.dtype}")
    if x.shape != noise.shape:
        return Decision(False, f"flow_mix mixes equal shapes, not {list(x.shape)} and {list(noise.shape)}")
    if time.requires_grad:
        return Decision(False, "flow_mix gives no gradient to the time")
    return YES


def flow_mix(
    x: Tensor, noise: Tensor, time: Tensor, *, towards: Towards = "noise", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(x_t, target velocity) for x and noise [B, ...] and times in [0, 1].

    Args:
        time: [B], [B, S] (S dividing x's second axis), or x's axes with 1 where it repeats.
        towards: ``noise`` when t = 1 is noise, ``data`` when t = 1 is data.
        dtype: of x_t, by default x's; the target has x's.

    Raises:
        ValueError: times that do not spread over x, or an unknown direction.
    """
    if towards not in ("noise", "data"):
        raise ValueError(f"flow_mix goes towards 'noise' or 'data', not {towards!r}")
    if not dispatch("flow_mix", x, supports(x, noise, time)):
        return reference(x, noise, time, towards=towards, dtype=dtype)
    over = values(time, x)
    return _forward(x, noise, over.flat, over.count, over.inner, towards == "data", dtype or x.dtype)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    b, each, times = (case.sizes[name] for name in ("B", "x", "time"))
    x, noise = (torch.randn(b, *each, device=device, generator=generator).to(dtype) for _ in range(2))
    time = torch.rand(b, *times, device=device, generator=generator)
    return {"x": x, "noise": noise, "time": time, "towards": case.sizes["towards"]}


KERNEL = KernelSpec(
    name="flow_mix",
    formula="t · noise + (1 - t) · x, noise - x",
    op=flow_mix,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("x", "noise"),
    caps={"B": 2},
    cases=(
        Case("pi05 actions", {"B": 32, "x": (50, 32), "time": (), "towards": "noise"}),
        Case("gr00t actions", {"B": 32, "x": (40, 132), "time": (1, 1), "towards": "data"}),
        Case("wan latents, per frame", {"B": 16, "x": (48, 3, 14, 28), "time": (1, 3, 1, 1), "towards": "noise"}),
        Case("action tokens, per block", {"B": 2, "x": (96, 32), "time": (4,), "towards": "noise"}),
        Case("odd", {"B": 3, "x": (7, 5), "time": (7,), "towards": "data"}),
    ),
)
