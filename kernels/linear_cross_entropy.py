"""Linear layer and cross-entropy together, so that the logits of all tokens never stand in memory.

    sum = Σ_n [label_n ≠ ignore] · (logsumexp(W h_n) - (W h_n)[label_n]),    count = Σ_n [label_n ≠ ignore]

Rows go through in chunks: one product gives a chunk's logits, one kernel turns them into losses and, over the same
memory, into softmax - onehot, two more products give the chunk's share of both gradients. So the gradients are made in
the forward (when anything asks for them) and the backward only scales them by dsum, into new tensors.

Axes: N tokens, D channels, V vocabulary, M rows of a chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import launch, op, power_of_2
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch

_LOGITS = 1 << 28
"""Elements of a chunk's logits: half a GiB in bf16, a thousand rows of a quarter-million vocabulary."""


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The formula in plain torch."""
    logits_NV = F.linear(hidden.flatten(0, -2), weight).float()
    labels_N = labels.flatten()
    total = F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="sum")
    return total, (labels_N != ignore_index).sum(dtype=torch.float32)


# ---- kernel


@triton.jit
def _kernel(
    logits_ptr, labels_ptr, losses_ptr, n_classes, stride, ignore_index, BLOCK: tl.constexpr, SLOPE: tl.constexpr
):  # fmt: skip
    """One program a row: its loss, and with SLOPE the logits become their own gradient."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    counts = label != ignore_index
    logits = logits_ptr + row * stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n_classes, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.load(logits + cols, mask=cols < n_classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, z)
        # A lane that has seen nothing yet keeps -inf: exp(-inf - -inf) would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - shift) + tl.exp(z - shift)
        top = higher
    best = tl.max(top, axis=0)
    logsumexp = best + tl.log(tl.sum(total * tl.exp(top - best), axis=0))
    picked = tl.load(logits + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(counts, logsumexp - picked, 0.0))
    if SLOPE:
        for start in range(0, n_classes, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            keep = cols < n_classes
            z = tl.load(logits + cols, mask=keep, other=float("-inf")).to(tl.float32)
            slope = tl.where(counts, tl.exp(z - logsumexp) - (cols == label).to(tl.float32), 0.0)
            tl.store(logits + cols, slope.to(logits_ptr.dtype.element_ty), mask=keep)


# ---- launcher and registration


def _fake(hidden, weight, labels, ignore_index, hidden_grad, weight_grad):
    total, count = (hidden.new_empty((), dtype=torch.float32) for _ in range(2))
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else (0,))
    return total, count, dhidden, weight.new_empty(weight.shape if weight_grad else (0,))


@op("linear_cross_entropy", _fake)
def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, labels = hidden.contiguous(), labels.contiguous()
    n, v = hidden.shape[0], weight.shape[0]
    chunk = max(1, min(n, power_of_2(max(1, _LOGITS // v) + 1) // 2))
    losses_N = hidden.new_empty(n, dtype=torch.float32)
    dhidden = _fake(hidden, weight, labels, ignore_index, hidden_grad, weight_grad)[2]
    # Shares of many chunks add up: in bf16 the small ones would be lost.
    dweight = weight.new_zeros(weight.shape, dtype=torch.float32) if weight_grad else weight.new_empty(0)
    for start in range(0, n, chunk):
        hidden_MD = hidden[start : start + chunk]
        logits_MV = hidden_MD @ weight.T
        launch(
            _kernel, (logits_MV.shape[0],), logits_MV, labels[start : start + chunk], losses_N[start : start + chunk],
            v, logits_MV.stride(0), ignore_index, BLOCK=min(4096, power_of_2(v)), SLOPE=hidden_grad or weight_grad,
            num_warps=8,
        )  # fmt: skip
        if hidden_grad:
            torch.mm(logits_MV, weight, out=dhidden[start : start + chunk])
        if weight_grad:
            dweight += logits_MV.T @ hidden_MD
    count = (labels != ignore_index).sum(dtype=torch.float32)
    return losses_N.sum(), count, dhidden, dweight.to(weight.dtype)


def _save(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])


def _gradients(ctx, dsum, *_):
    hidden, weight = (
        (slope * dsum).to(slope.dtype) if needed else None
        for slope, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
    )
    return hidden, weight, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


# ---- public


def supports(hidden: Tensor, weight: Tensor, labels: Tensor, **_) -> Decision:
    """fp32 / bf16 / fp16, hidden states and weight of one dtype, integer labels."""
    if hidden.dtype not in FLOATS or weight.dtype != hidden.dtype:
        return Decision(
            False,
            "linear_cross_entropy takes hidden states and a weight of one dtype out of fp32, bf16, "
            f"fp16, not {hidden.dtype} and {weight.dtype}",
        )
    if labels.dtype not in (torch.int64, torch.int32):
        return Decision(False, f"linear_cross_entropy takes integer labels, not {labels.dtype}")
    return YES


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """(sum, count), fp32 scalars: cross-entropy of ``hidden @ weight.T`` against `labels`.

    Args:
        hidden: [..., D]; weight: [V, D] of the same dtype; labels: int64 or int32 [...], classes or `ignore_index`.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1] or weight.ndim != 2:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} are not "
            "[..., D], [V, D] and [...]"
        )
    if not dispatch("linear_cross_entropy", hidden, supports(hidden, weight, labels)):
        return reference(hidden, weight, labels, ignore_index=ignore_index)
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
    flat = hidden.reshape(-1, hidden.shape[-1])
    return _forward(flat, weight, labels.reshape(-1), ignore_index, *wanted)[:2]


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    n, d, v = (case.sizes[axis] for axis in ("N", "D", "V"))
    hidden = torch.randn(n, d, device=device, generator=generator).to(dtype)
    weight = (torch.randn(v, d, device=device, generator=generator) * d**-0.5).to(dtype)
    labels = torch.randint(v, (n,), device=device, generator=generator)
    ignored = torch.rand(n, device=device, generator=generator) < 0.3
    return {"hidden": hidden, "weight": weight, "labels": labels.masked_fill(ignored, -100)}


KERNEL = KernelSpec(
    name="linear_cross_entropy",
    formula="Σ logsumexp(W h) - (W h)[label], Σ [label counts]",
    op=linear_cross_entropy,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("hidden", "weight"),
    # The logits are rounded to bf16 before the softmax, in the reference's bf16 form as well.
    tolerances={torch.float32: 2e-5, torch.bfloat16: 4e-2},
    caps={"N": 24, "V": 5003, "D": 256},
    cases=(
        Case("paligemma vocabulary", {"N": 4096, "D": 2048, "V": 257152}),
        Case("qwen3 vocabulary", {"N": 4096, "D": 2048, "V": 151936}),
        Case("odd", {"N": 37, "D": 65, "V": 1009}),
    ),
)
