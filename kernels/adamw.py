"""AdamW over many tensors in one pass: scale, guard, update, rounding, running average, and clearing the gradient.

    g ← scale · grad                        scale: clipping over loss scale, on the device
    m ← m + (1 - β₁)(g - m);  v ← β₂ v + (1 - β₂) g²
    w ← w (1 - lr · λ) - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
    param ← round(w);  ema ← ema + (1 - d)(w - ema)

If the guard says no, nothing changes (gradients are still cleared where that is asked for). Rate, count, scale and
verdict are 0-dim device tensors: no host sync, and a captured step does not bake them in. Weights are fp32 masters
with low-precision params beside them, or the params themselves.

The norm that the scale comes from is the other pass over the gradients: `square_sums`.

A launch finds its tensors through a table of addresses on the device, kept while the addresses stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vlaforge.kernels.addresses import BLOCK, BLOCKS, Addresses, dtype_of, locate, pointer, read, write
from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import launch, op
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch


def reference(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    params: Sequence[Tensor] = (),
    ema: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    ok: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    ema_decay: float = 0.0,
    zero_grads: bool = False,
) -> None:
    """The formula in plain torch, one tensor at a time, in place."""
    t = step.to(torch.float64)
    rate = (lr / (1 - beta1**t)).to(torch.float32)
    root = torch.sqrt(1 - beta2**t).to(torch.float32)
    keep = (1 - lr * weight_decay).to(torch.float32)
    for i, (w, grad, m, v) in enumerate(zip(weights, grads, exp_avgs, exp_avg_sqs, strict=True)):
        g = grad.float() * scale
        new_m = torch.lerp(m.float(), g, 1 - beta1)
        new_v = torch.addcmul(v.float() * beta2, g, g, value=1 - beta2)
        new_w = w.float() * keep - rate * new_m / (new_v.sqrt() / root + eps)
        targets = [(w, new_w), (m, new_m), (v, new_v)]
        targets += [(params[i], new_w)] if params else []
        targets += [(ema[i], torch.lerp(ema[i].float(), new_w, 1 - ema_decay))] if ema else []
        for old, new in targets:
            old.copy_(torch.where(ok, new.to(old.dtype), old))
        if zero_grads:
            grad.zero_()


# ---- kernels


@triton.jit
def _update_block(
    row, at, numel, ok, scale, rate, root, decay, beta1, beta2, eps, ema_decay,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, PARAM: tl.constexpr, EMA: tl.constexpr,
    ZERO: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    grad_ptr = pointer(row + 1, GRAD, ALIGNED)
    if ok:
        w_ptr, m_ptr, v_ptr = (
            pointer(row, WEIGHT, ALIGNED), pointer(row + 2, STATE, ALIGNED), pointer(row + 3, STATE, ALIGNED),
        )  # fmt: skip
        g = read(grad_ptr, at, numel, FULL) * scale
        m, v = read(m_ptr, at, numel, FULL), read(v_ptr, at, numel, FULL)
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * (g * g)
        w = read(w_ptr, at, numel, FULL) * decay - rate * (m / (tl.sqrt(v) / root + eps))
        write(m_ptr, at, m, numel, FULL)
        write(v_ptr, at, v, numel, FULL)
        write(w_ptr, at, w, numel, FULL)
        if PARAM is not None:
            write(pointer(row + 4, PARAM, ALIGNED), at, w, numel, FULL)
        if EMA is not None:
            ema_ptr = pointer(row + 5, EMA, ALIGNED)
            average = read(ema_ptr, at, numel, FULL)
            write(ema_ptr, at, average + (1.0 - ema_decay) * (w - average), numel, FULL)
    if ZERO:
        write(grad_ptr, at, tl.zeros(at.shape, dtype=tl.float32), numel, FULL)


@triton.jit
def _update_kernel(
    table_ptr, owner_ptr, lr_ptr, step_ptr, scale_ptr, ok_ptr,
    beta1, beta2, log_beta1, log_beta2, eps, weight_decay, ema_decay,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, PARAM: tl.constexpr, EMA: tl.constexpr,
    ZERO: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row, start, numel = locate(table_ptr, owner_ptr, 6, WIDTH * COUNT)
    ok = tl.load(ok_ptr) != 0
    lr, scale = tl.load(lr_ptr).to(tl.float32), tl.load(scale_ptr).to(tl.float32)
    # 1 - βᵗ loses its digits in fp32 when t is small, so this one number is made in fp64.
    t = tl.load(step_ptr).to(tl.float64)
    rate = lr / (1.0 - tl.exp(t * log_beta1)).to(tl.float32)
    root = tl.sqrt((1.0 - tl.exp(t * log_beta2)).to(tl.float32))
    beta1, beta2 = tl.cast(beta1, tl.float32), tl.cast(beta2, tl.float32)
    eps, ema_decay = tl.cast(eps, tl.float32), tl.cast(ema_decay, tl.float32)
    decay = 1.0 - lr * tl.cast(weight_decay, tl.float32)
    if start + WIDTH * COUNT <= numel:
        for block in range(COUNT):
            at = start + block * WIDTH + tl.arange(0, WIDTH)
            _update_block(
                row, at, numel, ok, scale, rate, root, decay, beta1, beta2, eps, ema_decay,
                WEIGHT, GRAD, STATE, PARAM, EMA, ZERO, ALIGNED, True,
            )  # fmt: skip
    else:
        for block in range(COUNT):
            at = start + block * WIDTH + tl.arange(0, WIDTH)
            _update_block(
                row, at, numel, ok, scale, rate, root, decay, beta1, beta2, eps, ema_decay,
                WEIGHT, GRAD, STATE, PARAM, EMA, ZERO, ALIGNED, False,
            )  # fmt: skip


# ---- launchers and registration


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@op("adamw", lambda *_: None, mutates=("weights", "grads", "exp_avgs", "exp_avg_sqs", "params", "ema"))
def _update(
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    params: list[Tensor],
    ema: list[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    ok: Tensor,
    constants: list[float],
    zero_grads: bool,
) -> None:
    beta1, beta2, eps, weight_decay, ema_decay = constants
    places = Addresses.of([weights, grads, exp_avgs, exp_avg_sqs, params, ema])
    launch(
        _update_kernel, (places.chunks,), places.table, places.owner, lr, step, scale, ok,
        beta1, beta2, _log(beta1), _log(beta2), eps, weight_decay, ema_decay,
        WEIGHT=dtype_of(weights), GRAD=dtype_of(grads), STATE=dtype_of(exp_avgs), PARAM=dtype_of(params),
        EMA=dtype_of(ema), ZERO=zero_grads, ALIGNED=places.aligned, WIDTH=BLOCK, COUNT=BLOCKS, num_warps=4,
    )  # fmt: skip


# ---- public


def supports(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor] = (),
    exp_avg_sqs: Sequence[Tensor] = (),
    params: Sequence[Tensor] = (),
    ema: Sequence[Tensor] = (),
    **_,
) -> Decision:
    """Each list of one dtype out of fp32, bf16 and fp16. Tensors need not be contiguous, see `adamw`."""
    for name, tensors in (("weights", weights), ("grads", grads), ("params", params), ("ema", ema)):
        kinds = {tensor.dtype for tensor in tensors}
        if len(kinds) > 1 or kinds - set(FLOATS):
            return Decision(
                False, f"adamw takes {name} of one dtype, fp32, bf16 or fp16, not {sorted(map(str, kinds))}"
            )
    if len({tensor.dtype for tensor in (*exp_avgs, *exp_avg_sqs)}) > 1:
        return Decision(False, "adamw takes moments of one dtype")
    return YES


def adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    params: Sequence[Tensor] = (),
    ema: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    step: Tensor,
    scale: Tensor,
    ok: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    ema_decay: float = 0.0,
    zero_grads: bool = False,
) -> None:
    """One AdamW update in place, of tensors that share a rate, a decay and a count of updates.

    Contiguous tensors go through one launch; others (a sharded view, a transposed weight) one by one through the
    reference.

    Args:
        weights: what is updated; fp32 masters, or the parameters.
        grads, exp_avgs, exp_avg_sqs: of the same shapes; gradients may have a lower precision.
        params: low-precision copies of the weights, rounded from them after the update; empty without masters.
        ema: running averages of the weights; empty for none. `ema_decay` is d above.
        lr, step, scale, ok: 0-dim tensors on the device: rate, count of updates including this one, factor on the
            gradients, verdict of the guard (bool).
        zero_grads: clear the gradients in the same pass, also when the verdict is no.
    """
    lists = [list(part) for part in (weights, grads, exp_avgs, exp_avg_sqs, params, ema)]
    options = {"lr": lr, "step": step, "scale": scale, "ok": ok, "beta1": beta1, "beta2": beta2, "eps": eps}
    options |= {"weight_decay": weight_decay, "ema_decay": ema_decay, "zero_grads": zero_grads}
    if not weights:
        return
    if not dispatch("adamw", weights[0], supports(*lists)):
        return reference(*lists, **options)
    dense = [all(tensor.is_contiguous() for tensor in row) for row in zip(*(part for part in lists if part))]
    if not all(dense):
        rest = [[x for x, fits in zip(part, dense) if not fits] for part in lists]
        lists = [[x for x, fits in zip(part, dense) if fits] for part in lists]
        reference(*rest, **options)
    if lists[0]:
        _update(*lists, lr, step, scale, ok, [beta1, beta2, eps, weight_decay, ema_decay], zero_grads)


def _changed(function, **inputs) -> tuple[Tensor, ...]:
    """`function` on copies: all that it may have written."""
    names = ("weights", "grads", "exp_avgs", "exp_avg_sqs", "params", "ema")
    copies = {name: [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs[name]] for name in names}
    function(**{**inputs, **copies})
    return tuple(tensor for name in names for tensor in copies[name])


def _checked(**inputs) -> tuple[Tensor, ...]:
    return _changed(adamw, **inputs)


def _checked_reference(**inputs) -> tuple[Tensor, ...]:
    return _changed(reference, **inputs)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    d, f, kv = case.sizes["D"], case.sizes["F"], case.sizes["KV"]
    shapes = [(d, d), (kv, d), (kv, d), (d, d), (f, d), (f, d), (d, f), (d,), (1,)] * case.sizes["layers"]

    def normal(kind: torch.dtype, size: float) -> list[Tensor]:
        return [(torch.randn(s, device=device, generator=generator) * size).to(kind) for s in shapes]

    def number(value: float, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.full((), value, dtype=kind, device=device)

    weights, low = normal(torch.float32, 0.02), dtype != torch.float32
    return {
        "weights": weights,
        "grads": normal(dtype, 1e-3),
        "exp_avgs": normal(torch.float32, 1e-3),
        "exp_avg_sqs": [v.square() for v in normal(torch.float32, 1e-3)],
        "params": [w.to(dtype) for w in weights] if low else [],
        "ema": [w * 0.99 for w in weights] if case.sizes["ema"] else [],
        "lr": number(2.5e-5, torch.float64),
        "step": number(3.0),
        "scale": number(0.37),
        "ok": number(case.sizes.get("ok", True), torch.bool),
        "weight_decay": 0.01,
        "ema_decay": 0.999,
        "zero_grads": case.sizes.get("zero", False),
    }


KERNEL = KernelSpec(
    name="adamw",
    formula="AdamW with scale, guard, masters and average",
    op=_checked,
    reference=_checked_reference,
    timed=(adamw, reference),
    inputs=_inputs,
    supports=supports,
    caps={"layers": 1, "D": 96, "F": 300, "KV": 40},
    cases=(
        Case("pi05 language, masters and average", {"layers": 4, "D": 2048, "F": 16384, "KV": 256, "ema": True}),
        Case("pi05 language, masters", {"layers": 4, "D": 2048, "F": 16384, "KV": 256, "ema": False}),
        Case("odd", {"layers": 1, "D": 33, "F": 129, "KV": 7, "ema": True, "zero": True}),
        Case("odd, refused", {"layers": 1, "D": 33, "F": 129, "KV": 7, "ema": True, "zero": True, "ok": False}),
    ),
)
