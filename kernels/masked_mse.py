"""Masked squared error as a sum and a count: what one masked mean over micro-batches and ranks is made of.

    sum = Σ_i m_i · w_i · (prediction_i - target_i)²,    count = Σ_i m_i

Masked elements are never read into the sum: whatever stands there, NaN included, changes nothing. Both results are
fp32; partial sums are added in a fixed order.

Backward:  dprediction_i = 2 · m_i · w_i · (prediction_i - target_i) · dsum.  Target, mask and weight get none.

Axes: B samples; the rest is whatever the prediction has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import FLAT, cdiv, launch, only_first_has_gradient, op
from vlaforge.kernels.scalars import value_of, values
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch


def reference(prediction: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The formula in plain torch."""
    keep = values(mask, prediction).view.expand_as(prediction)
    square = torch.where(keep, prediction.float() - target.float(), 0.0).square()
    if weight is not None:
        square = square * values(weight, prediction).view.float()
    return square.sum(), keep.sum(dtype=torch.float32)


# ---- kernels


@triton.jit
def _forward_kernel(
    prediction_ptr, target_ptr, mask_ptr, weight_ptr, sum_ptr, count_ptr, per_sample,
    mask_count, mask_inner, weight_count, weight_inner, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    counted = tl.zeros([WIDTH], dtype=tl.float32)
    for block in range(BLOCKS):
        element = (tl.program_id(0) * BLOCKS + block) * WIDTH + tl.arange(0, WIDTH)
        keep = element < per_sample
        at = sample.to(tl.int64) * per_sample + element
        keep = tl.load(mask_ptr + value_of(sample, element, mask_count, mask_inner), mask=keep, other=0) != 0
        prediction = tl.load(prediction_ptr + at, mask=keep, other=0.0).to(tl.float32)
        target = tl.load(target_ptr + at, mask=keep, other=0.0).to(tl.float32)
        square = (prediction - target) * (prediction - target)
        if weight_ptr is not None:
            place = value_of(sample, element, weight_count, weight_inner)
            square *= tl.load(weight_ptr + place, mask=keep, other=0.0).to(tl.float32)
        total += square
        counted += keep.to(tl.float32)
    place = sample * tl.num_programs(0) + tl.program_id(0)
    tl.store(sum_ptr + place, tl.sum(total, axis=0))
    tl.store(count_ptr + place, tl.sum(counted, axis=0))


@triton.jit
def _backward_kernel(
    dsum_ptr, prediction_ptr, target_ptr, mask_ptr, weight_ptr, out_ptr, per_sample,
    mask_count, mask_inner, weight_count, weight_inner, WIDTH: tl.constexpr,
):  # fmt: skip
    sample, element = tl.program_id(1), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = element < per_sample
    at = sample.to(tl.int64) * per_sample + element
    keep = tl.load(mask_ptr + value_of(sample, element, mask_count, mask_inner), mask=inside, other=0) != 0
    prediction = tl.load(prediction_ptr + at, mask=keep, other=0.0).to(tl.float32)
    target = tl.load(target_ptr + at, mask=keep, other=0.0).to(tl.float32)
    slope = 2.0 * (prediction - target) * tl.load(dsum_ptr).to(tl.float32)
    if weight_ptr is not None:
        place = value_of(sample, element, weight_count, weight_inner)
        slope *= tl.load(weight_ptr + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, tl.where(keep, slope, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


# ---- launchers and registration

_BLOCKS = 4


def _forward_fake(prediction, target, mask, weight, spread):
    return tuple(prediction.new_empty((), dtype=torch.float32) for _ in range(2))


@op("masked_mse", _forward_fake)
def _forward(
    prediction: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None, spread: list[int]
) -> tuple[Tensor, Tensor]:
    prediction, target, mask = prediction.contiguous(), target.contiguous(), mask.contiguous()
    weight = weight if weight is None else weight.contiguous()
    samples, each = prediction.shape[0], prediction.shape[1:].numel()
    count = cdiv(each, _BLOCKS * FLAT.width)
    partial = prediction.new_empty((2, samples * count), dtype=torch.float32)
    launch(
        _forward_kernel, (count, samples), prediction, target, mask, weight, partial[0], partial[1], each, *spread,
        WIDTH=FLAT.width, BLOCKS=_BLOCKS, num_warps=FLAT.num_warps,
    )  # fmt: skip
    total, counted = partial.sum(1).unbind()
    return total.clone(), counted.clone()


@op("masked_mse_backward", lambda dsum, prediction, *_: prediction.new_empty(prediction.shape))
def _backward(
    dsum: Tensor, prediction: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None, spread: list[int]
) -> Tensor:
    prediction, target, mask = prediction.contiguous(), target.contiguous(), mask.contiguous()
    weight = weight if weight is None else weight.contiguous()
    out, each = prediction.new_empty(prediction.shape), prediction.shape[1:].numel()
    launch(
        _backward_kernel, (cdiv(each, FLAT.width), prediction.shape[0]), dsum, prediction, target, mask, weight, out,
        each, *spread, WIDTH=FLAT.width, num_warps=FLAT.num_warps,
    )  # fmt: skip
    return out


def _save(ctx, inputs, output):
    *tensors, ctx.spread = inputs
    ctx.save_for_backward(*tensors)
    only_first_has_gradient(ctx, output)


def _gradients(ctx, dsum, _):
    return _backward(dsum, *ctx.saved_tensors, ctx.spread), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(prediction: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None = None) -> Decision:
    """fp32 / bf16 / fp16 of equal shapes, a bool mask; only the prediction gets a gradient."""
    for name, tensor in (("prediction", prediction), ("target", target), ("weight", weight)):
        if tensor is not None and tensor.dtype not in FLOATS:
            return Decision(False, f"masked_mse takes fp32, bf16 or fp16, and {name} is {tensor.dtype}")
    if target.shape != prediction.shape:
        return Decision(False, f"masked_mse compares equal shapes, not {list(target.shape)}")
    if target.requires_grad or (weight is not None and weight.requires_grad):
        return Decision(False, "masked_mse gives a gradient to the prediction only")
    return YES


def masked_mse(prediction: Tensor, target: Tensor, mask: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum, count), fp32 scalars, of the squared error of `prediction` [B, ...] against `target`.

    Args:
        mask: bool, and `weight`: float; each [B], [B, S] or the prediction's axes with 1 where it repeats. The count
            counts elements of the prediction.

    Raises:
        ValueError: a mask or weight that does not spread over the prediction, or a mask that is not bool.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"masked_mse needs a bool mask, not {mask.dtype}")
    if not dispatch("masked_mse", prediction, supports(prediction, target, mask, weight)):
        return reference(prediction, target, mask, weight)
    over = [values(mask, prediction)] + ([values(weight, prediction)] if weight is not None else [])
    spread = [number for part in over for number in (part.count, part.inner)] + [1, 1] * (2 - len(over))
    return _forward(prediction, target, mask, weight, spread)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    b, each = case.sizes["B"], case.sizes["x"]
    prediction, target = (torch.randn(b, *each, device=device, generator=generator).to(dtype) for _ in range(2))
    mask = torch.rand(b, *case.sizes["mask"], device=device, generator=generator) < 0.7
    target = torch.where(values(mask, target).view, target, float("nan"))  # garbage where nothing may look
    inputs = {"prediction": prediction, "target": target, "mask": mask}
    if "weight" in case.sizes:
        inputs["weight"] = torch.rand(b, *case.sizes["weight"], device=device, generator=generator)
    return inputs


KERNEL = KernelSpec(
    name="masked_mse",
    formula="Σ m · w · (prediction - target)², Σ m",
    op=masked_mse,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("prediction",),
    caps={"B": 2},
    cases=(
        Case("pi05 actions", {"B": 32, "x": (50, 32), "mask": (50, 32)}),
        Case("gr00t actions, by step", {"B": 32, "x": (40, 132), "mask": (40,)}),
        Case("wan latents, by frame", {"B": 16, "x": (48, 3, 14, 28), "mask": (1, 3, 1, 1), "weight": ()}),
        Case("odd, by block", {"B": 3, "x": (14, 5), "mask": (14, 1), "weight": (7,)}),
    ),
)
