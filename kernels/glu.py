"""Gated linear units between the two halves of an MLP: GeGLU and SwiGLU.

    y = act(gate) · up,    act = gelu (tanh form) or silu

Both are gate · sigmoid(z) with z = gate (silu), or z = √(8/π) · (gate + 0.044715 · gate³), since
½ (1 + tanh(z/2)) = sigmoid(z).

Backward, with s = sigmoid(z):  dup = dy · gate · s,  dgate = dy · up · (s + gate · s · (1 - s) · dz/dgate).

Gate and up are two tensors, or the halves of one packed [..., 2F] projection; then the gradient is one packed tensor
too, written in place of a concatenation.

Axes: N rows, F hidden channels.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.kernels.compat import tl, triton
from vlaforge.kernels.launch import FLAT, cdiv, launch, op, power_of_2, rows_of
from vlaforge.kernels.spec import FLOATS, YES, Case, Decision, KernelSpec, dispatch

Activation = Literal["gelu", "silu"]


def reference(gate: Tensor, up: Tensor | None = None, *, activation: Activation = "gelu") -> Tensor:
    """The formula in plain torch."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    wide = gate.float()
    wide = F.gelu(wide, approximate="tanh") if activation == "gelu" else F.silu(wide)
    return (wide * up.float()).to(gate.dtype)


# ---- kernels


@triton.jit
def _gating(gate, GELU: tl.constexpr):
    """(sigmoid(z), dz/dgate)."""
    if GELU:
        square = gate * gate
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * square)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
    else:
        z = gate
        slope = tl.full(gate.shape, 1.0, tl.float32)
    return tl.sigmoid(z), slope


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, n_rows, n_cols, gate_stride, up_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    keep = (rows < n_rows) & (cols < n_cols)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=keep, other=0.0).to(tl.float32)
    s, _ = _gating(gate, GELU)
    tl.store(y_ptr + rows * n_cols + cols, (gate * s * up).to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n_rows, n_cols,
    dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    keep = (rows < n_rows) & (cols < n_cols)
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=keep, other=0.0).to(tl.float32)
    s, slope = _gating(gate, GELU)
    dup = dy * gate * s
    dgate = dy * up * (s + gate * s * (1.0 - s) * slope)
    tl.store(dgate_ptr + rows * dgate_stride + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=keep)
    tl.store(dup_ptr + rows * dup_stride + cols, dup.to(dup_ptr.dtype.element_ty), mask=keep)


# ---- launchers and registration


def _tile(n: int, f: int) -> tuple[int, int, tuple[int, int]]:
    """(rows, columns, grid): blocks of 1024 elements."""
    width = min(FLAT.width, power_of_2(f))
    rows = max(1, FLAT.width // width)
    return rows, width, (cdiv(n, rows), cdiv(f, width))


def _start_forward(gate_NF: Tensor, up_NF: Tensor, y: Tensor, gelu: bool) -> None:
    n, f = gate_NF.shape
    rows, width, grid = _tile(n, f)
    launch(
        _forward_kernel, grid, gate_NF, up_NF, y, n, f, gate_NF.stride(0), up_NF.stride(0),
        ROWS=rows, WIDTH=width, GELU=gelu, num_warps=FLAT.num_warps,
    )  # fmt: skip


def _start_backward(dy: Tensor, gate_NF: Tensor, up_NF: Tensor, dgate_NF: Tensor, dup_NF: Tensor, gelu: bool) -> None:
    (n, f), dy_NF = gate_NF.shape, rows_of(dy)
    rows, width, grid = _tile(n, f)
    launch(
        _backward_kernel, grid, dy_NF, gate_NF, up_NF, dgate_NF, dup_NF, n, f,
        *(tensor.stride(0) for tensor in (dy_NF, gate_NF, up_NF, dgate_NF, dup_NF)),
        ROWS=rows, WIDTH=width, GELU=gelu, num_warps=FLAT.num_warps,
    )  # fmt: skip


@op("glu", lambda gate, up, gelu: gate.new_empty(gate.shape))
def _forward(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    y = gate.new_empty(gate.shape)
    _start_forward(rows_of(gate), rows_of(up), y, gelu)
    return y


@op("glu_backward", lambda dy, gate, up, gelu: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def _backward(dy: Tensor, gate: Tensor, up: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _start_backward(dy, rows_of(gate), rows_of(up), rows_of(dgate), rows_of(dup), gelu)
    return dgate, dup


def _packed_fake(packed, gelu):
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


@op("glu_packed", _packed_fake)
def _packed_forward(packed: Tensor, gelu: bool) -> Tensor:
    y = _packed_fake(packed, gelu)
    _start_forward(*rows_of(packed).chunk(2, dim=-1), y, gelu)
    return y


@op("glu_packed_backward", lambda dy, packed, gelu: packed.new_empty(packed.shape))
def _packed_backward(dy: Tensor, packed: Tensor, gelu: bool) -> Tensor:
    out = packed.new_empty(packed.shape)
    _start_backward(dy, *rows_of(packed).chunk(2, dim=-1), *rows_of(out).chunk(2, dim=-1), gelu)
    return out


def _save(ctx, inputs, output):
    *tensors, ctx.gelu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, dy):
    return *_backward(dy, *ctx.saved_tensors, ctx.gelu), None


def _packed_gradients(ctx, dy):
    return _packed_backward(dy, *ctx.saved_tensors, ctx.gelu), None


_forward.register_autograd(_gradients, setup_context=_save)
_packed_forward.register_autograd(_packed_gradients, setup_context=_save)


# ---- public


def supports(gate: Tensor, up: Tensor | None = None, **_) -> Decision:
    """fp32 / bf16 / fp16; gate and up of equal shape and dtype, or one packed tensor of even width."""
    if gate.dtype not in FLOATS:
        return Decision(False, f"glu takes fp32, bf16 or fp16, not {gate.dtype}")
    if up is None:
        even = gate.shape[-1] % 2 == 0
        return YES if even else Decision(False, f"a packed glu needs an even width, not {gate.shape[-1]}")
    if up.shape != gate.shape or up.dtype != gate.dtype:
        return Decision(False, f"gate {gate.dtype} {list(gate.shape)} and up {up.dtype} {list(up.shape)} differ")
    return YES


def glu(gate: Tensor, up: Tensor | None = None, *, activation: Activation = "gelu") -> Tensor:
    """``act(gate) · up`` for gate and up [..., F], or for one packed [..., 2F] (gate first) when `up` is None.

    Raises:
        ValueError: an `activation` other than ``gelu`` (tanh form) and ``silu``.
    """
    if activation not in ("gelu", "silu"):
        raise ValueError(f"glu has the activations 'gelu' and 'silu', not {activation!r}")
    if not dispatch("glu", gate, supports(gate, up)):
        return reference(gate, up, activation=activation)
    gelu = activation == "gelu"
    return _packed_forward(gate, gelu) if up is None else _forward(gate, up, gelu)


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`glu` with gelu in its tanh form (Gemma)."""
    return glu(gate, up, activation="gelu")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`glu` with silu (Qwen3)."""
    return glu(gate, up, activation="silu")


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict:
    size = case.sizes
    packed = torch.randn(size["B"], size["T"], 2 * size["F"], device=device, generator=generator).to(dtype)
    gate, up = (packed, None) if size["packed"] else packed.chunk(2, dim=-1)
    return {"gate": gate, "up": up, "activation": size["activation"]}


KERNEL = KernelSpec(
    name="glu",
    formula="act(gate) · up, act gelu (tanh) or silu",
    op=glu,
    reference=reference,
    inputs=_inputs,
    supports=supports,
    grads=("gate", "up"),
    caps={"B": 2, "T": 3, "F": 2500},
    cases=(
        Case("pi05 language, packed", {"B": 32, "T": 762, "F": 16384, "activation": "gelu", "packed": True}),
        Case("pi05 expert", {"B": 32, "T": 50, "F": 4096, "activation": "gelu", "packed": False}),
        Case("qwen3 2b, packed", {"B": 16, "T": 192, "F": 6144, "activation": "silu", "packed": True}),
        Case("cosmos3 8b", {"B": 2, "T": 4096, "F": 12288, "activation": "silu", "packed": False}),
        Case("odd, packed", {"B": 3, "T": 37, "F": 331, "activation": "silu", "packed": True}),
        Case("odd", {"B": 3, "T": 5, "F": 331, "activation": "gelu", "packed": False}),
    ),
)
