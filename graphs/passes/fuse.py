"""fuse: one table from block class to the function that runs it, for each kind of device.

On a GPU the functions are the kernels of `vlaforge.kernels`. On a CPU, elementwise work is left to `compile_blocks`
(one generated loop, forward and backward), which is given a GELU that it can make fast; the rest of the gain is in the
products: fp32 ones go to oneDNN where the default BLAS is slower (measured), those of bf16 run in fp32 where torch has
no fast ones, attention runs as two products around a softmax (`kernels.cpu`), or in one loop on the tiles of a CPU that
has them (bf16, `kernels.native.attention`), depthwise convolutions as one walk over memory, those of many weights as
products of patches (`kernels.native`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.graphs.native import native
from vlaforge.graphs.packing import last_rows
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site, claim
from vlaforge.kernels import cpu
from vlaforge.kernels.ada_norm import ada_norm
from vlaforge.kernels.cpu import Products
from vlaforge.kernels.flow_mix import flow_mix
from vlaforge.kernels.gated_residual import gated_residual
from vlaforge.kernels.gelu import gelu
from vlaforge.kernels.glu import glu
from vlaforge.kernels.image_prep import image_prep
from vlaforge.kernels.masked_mse import masked_mse
from vlaforge.kernels.native import attention as tiled
from vlaforge.kernels.native.depthwise import depthwise, is_depthwise, takes
from vlaforge.kernels.native.patches import convolution, may_pay, pays
from vlaforge.kernels.qk_norm_rope import qk_norm_rope
from vlaforge.kernels.rms_norm import rms_norm
from vlaforge.kernels.rotary import rotary
from vlaforge.models.action.embodiment import EmbodimentLinear
from vlaforge.models.action.flow import FlowMix, MaskedSquares
from vlaforge.models.blocks.attention import Attention, Mask
from vlaforge.models.blocks.image import NormalizeImages, PrepareImages
from vlaforge.models.blocks.linear import Multiplying
from vlaforge.models.blocks.mlp import MLP, GatedActivation
from vlaforge.models.blocks.modulation import GatedAdd, ModulatedLayerNorm
from vlaforge.models.blocks.norms import AdaRMSNorm, RMSNorm
from vlaforge.models.blocks.rotary import HeadNormRotary, Rotary
from vlaforge.models.towers.florence2 import ConvEmbed, DropoutAttention
from vlaforge.models.video.rope import QKNormRotary


@dataclass(frozen=True)
class Swap:
    """One line of the table.

    Args:
        block: class of the modules it serves, and of those that inherit the method from it.
        what: its name in the plan.
        method: which method is replaced.
        function: called as ``function(module, ...)`` in the method's place.
        fits: ``fits(module, context)``: whether it runs this module, and is worth it.
    """

    block: type[nn.Module]
    what: str
    method: str
    function: Callable[..., Any]
    fits: Callable[[nn.Module, Context], bool]

    def serves(self, module: nn.Module) -> bool:
        own = getattr(type(module), self.method, None)
        return isinstance(module, self.block) and own is getattr(self.block, self.method)


# ---------------------------------------------------------------------------------------------------- CPU


FEW_PAIRS = 180**2
"""Pairs (query, key) of a head below which SDPA is faster in fp32, as measured: windows, short texts, channels."""


def linear_by(products: Products) -> Callable[..., Tensor]:
    def fast_linear(self: nn.Linear, x: Tensor, last: int = 0) -> Tensor:
        return products.linear(x, *last_rows(self, last))

    return fast_linear


def product_by(products: Products) -> Callable[..., Tensor]:
    def product(self: Multiplying, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return products.linear(x, weight, bias)

    return product


def attention_by(products: Products) -> Callable[..., Tensor]:
    def fast_attention(
        self: Attention, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask | None = None
    ) -> Tensor:
        mask, scale = mask or Mask(), q_BHTK.shape[-1] ** -0.5
        low = q_BHTK.dtype == torch.bfloat16
        if products.tiles and low and mask.segments_BT is None and tiled.serves(q_BHTK, k_BGSK, v_BGSK):
            return tiled.attention(q_BHTK, k_BGSK, v_BGSK, mask.keys_BS, mask.bias_S, scale, mask.is_causal)
        if mask.is_causal or mask.segments_BT is not None or mask.bias_S is not None:
            return type(self).forward(self, q_BHTK, k_BGSK, v_BGSK, mask)
        pairs = q_BHTK.shape[1] // k_BGSK.shape[1] * q_BHTK.shape[2] * k_BGSK.shape[2]
        if not low and pairs < FEW_PAIRS:
            return type(self).forward(self, q_BHTK, k_BGSK, v_BGSK, mask)
        return cpu.attention(q_BHTK, k_BGSK, v_BGSK, mask.keys_BS, scale, products.onednn)

    return widened(fast_attention) if products.widened else fast_attention


def depthwise_conv(self: nn.Conv2d, x_NCHW: Tensor) -> Tensor:
    if not takes(x_NCHW, self.weight):
        return type(self).forward(self, x_NCHW)
    return depthwise(x_NCHW, self.weight, self.bias)


def convolve_by(products: Products) -> Callable[..., Tensor]:
    def fast_convolve(self: ConvEmbed, x_NhwC: Tensor) -> Tensor:
        if not pays(self.conv, x_NhwC):
            return type(self).convolve(self, x_NhwC)
        return convolution(self.conv, x_NhwC, products)

    return fast_convolve


def widened(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method with bf16 widened on the way in, and the result rounded: for what multiplies its arguments alone."""

    def is_low(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dtype == torch.bfloat16

    def wide(self: nn.Module, *args: Any) -> Tensor:
        y = method(self, *(x.float() if is_low(x) else x for x in args))
        return y.bfloat16() if any(map(is_low, args)) else y

    return wide


GELUS = {"none": False, "gelu": False, "tanh": True, "gelu_tanh": True}
"""Whether a GELU of that name is the one by tanh."""


def fast_gelu(self: nn.GELU, x: Tensor) -> Tensor:
    return gelu(x, GELUS[self.approximate])


def fast_mlp(self: MLP, x_BTD: Tensor) -> Tensor:
    return self.fc2(gelu(self.fc1(x_BTD), GELUS[self.activation]))


def fast_glu(self: GatedActivation, gate_BTF: Tensor, up_BTF: Tensor | None = None) -> Tensor:
    """Also takes the packed [gate | up] alone."""
    if up_BTF is None:
        gate_BTF, up_BTF = gate_BTF.chunk(2, dim=-1)
    return gelu(gate_BTF, GELUS[self.activation]) * up_BTF


def _native_depthwise(module: nn.Module, context: Context) -> bool:
    return is_depthwise(module) and native() is not None


def _native_convolution(module: ConvEmbed, context: Context) -> bool:
    return may_pay(module.conv) and native() is not None


def _compiled_gelu(module: nn.Module, context: Context) -> bool:
    kind = module.approximate if isinstance(module, nn.GELU) else module.activation
    return kind in GELUS and context.options.compiles and "compile_blocks" not in context.options.without


def _low(context: Context) -> bool:
    return "precision" in context.on and context.options.torch_dtype == torch.bfloat16


def _tiles() -> bool:
    """Whether the processor has tiles (AMX) and the loops that use them could be built."""
    loops = native()
    return loops is not None and loops.has_tiles


def cpu_table(context: Context) -> tuple[Swap, ...]:
    """In bf16 oneDNN serves what `keep_fp32` holds back: the weights that a call finds decide."""
    # Settled here: measuring and building are nothing for a traced forward.
    products = Products(cpu.prefers_onednn(), _tiles(), _low(context) and cpu.widens())
    low = products.widened
    better = low or products.onednn or products.tiles
    return (
        Swap(nn.Linear, "linear", "forward", linear_by(products), lambda *_: better),
        Swap(Multiplying, "linear", "product", product_by(products), lambda *_: better),
        Swap(Attention, "attention", "forward", attention_by(products), lambda *_: products.onednn or _low(context)),
        Swap(nn.Conv2d, "depthwise", "forward", depthwise_conv, _native_depthwise),
        Swap(nn.Conv2d, "wide convolution", "_conv_forward", widened(nn.Conv2d._conv_forward), lambda *_: low),
        Swap(nn.Conv3d, "wide convolution", "_conv_forward", widened(nn.Conv3d._conv_forward), lambda *_: low),
        Swap(ConvEmbed, "convolution", "convolve", convolve_by(products), _native_convolution),
        Swap(EmbodimentLinear, "embodiment", "multiply", widened(EmbodimentLinear.multiply), lambda *_: low),
        Swap(DropoutAttention, "attention", "forward", widened(DropoutAttention.forward), lambda *_: low),
        Swap(GatedActivation, "glu", "forward", fast_glu, _compiled_gelu),
        Swap(MLP, "gelu", "forward", fast_mlp, _compiled_gelu),
        Swap(nn.GELU, "gelu", "forward", fast_gelu, _compiled_gelu),
    )


# ---------------------------------------------------------------------------------------------------- GPU


def fused_rms(self: RMSNorm, x: Tensor) -> Tensor:
    return rms_norm(x, self.weight, eps=self.eps, plus_one=self.offset == 1.0)


def fused_modulate(self: AdaRMSNorm, x_BTD: Tensor, modulation_BM: Tensor) -> tuple[Tensor, Tensor]:
    scale_B1D, shift_B1D, gate_B1D = modulation_BM[:, None].chunk(3, dim=-1)
    return ada_norm(x_BTD, scale_B1D, shift_B1D, kind="rms", eps=self.eps), gate_B1D


def fused_modulated_layer(self: ModulatedLayerNorm, x_BSD: Tensor, scale_BGD: Tensor, shift_BGD: Tensor) -> Tensor:
    return ada_norm(x_BSD, scale_BGD, shift_BGD, kind="layer", eps=self.eps)


def fused_gated_add(self: GatedAdd, x_BSD: Tensor, y_BSD: Tensor, gate_BGD: Tensor) -> Tensor:
    return gated_residual(x_BSD, y_BSD, gate_BGD)


def fused_glu(self: GatedActivation, gate_BTF: Tensor, up_BTF: Tensor | None = None) -> Tensor:
    """Also takes the packed [gate | up] alone, and then writes one packed gradient."""
    return glu(gate_BTF, up_BTF, activation=GLU[self.activation])


def fused_rotary(self: Rotary, x_BHTK: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor) -> Tensor:
    half = x_BHTK.shape[-1] // 2
    return rotary(x_BHTK.transpose(1, 2), cos_BTJ[..., :half], sin_BTJ[..., :half]).transpose(1, 2)


def fused_qk(
    self: QKNormRotary, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos_SP: Tensor, sin_SP: Tensor
) -> tuple[Tensor, Tensor]:
    return qk_norm_rope(q, k, q_weight, k_weight, cos_SP, sin_SP, eps=self.eps, layout="interleaved")


def fused_head_norm(
    self: HeadNormRotary, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos_BTJ: Tensor, sin_BTJ: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), q_weight, k_weight, cos_BTJ, sin_BTJ, eps=self.eps)
    return q.transpose(1, 2), k.transpose(1, 2)


def fused_mix(
    self: FlowMix, noise_BHA: Tensor, actions_BHA: Tensor, mask_BHA: Tensor, time_B: Tensor
) -> tuple[Tensor, Tensor]:
    return flow_mix(actions_BHA.masked_fill(~mask_BHA, 0.0), noise_BHA, time_B, towards=self.towards)


def fused_squares(self: MaskedSquares, prediction: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return masked_mse(prediction, target, mask)


def fused_images(
    self: PrepareImages, images: Tensor, dtype: torch.dtype = torch.float32, placements: Tensor | None = None
) -> Tensor:
    if images.dtype != torch.uint8 or images.shape[-1] != 3:
        return type(self).forward(self, images, dtype, placements)
    places_NP = None if placements is None else placements.flatten(0, 1)
    return image_prep(images.flatten(0, 1), (self.size, self.size), places_NP, dtype=dtype)


def fused_normalized(self: NormalizeImages, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Frames of the model's size, as robots mostly record for it; another size is resized bicubically, by torch."""
    if images.dtype != torch.uint8 or tuple(images.shape[-3:]) != (*self.size, 3):
        return type(self).forward(self, images, dtype)
    return image_prep(images.flatten(0, 1), self.size, mean=self.mean, std=self.std, dtype=dtype)


GLU = {"gelu_tanh": "gelu", "silu": "silu"}


def _always(module: nn.Module, context: Context) -> bool:
    return True


CUDA_TABLE = (
    Swap(RMSNorm, "rms_norm", "forward", fused_rms, lambda module, _: module.offset in (0.0, 1.0)),
    Swap(AdaRMSNorm, "ada_norm", "modulate", fused_modulate, _always),
    Swap(ModulatedLayerNorm, "ada_layer_norm", "forward", fused_modulated_layer, _always),
    Swap(GatedAdd, "gated_residual", "forward", fused_gated_add, _always),
    Swap(GatedActivation, "glu", "forward", fused_glu, lambda module, _: module.activation in GLU),
    Swap(Rotary, "rotary", "forward", fused_rotary, _always),
    Swap(QKNormRotary, "qk_norm_rope", "forward", fused_qk, _always),
    Swap(HeadNormRotary, "qk_norm_rope", "forward", fused_head_norm, _always),
    Swap(FlowMix, "flow_mix", "forward", fused_mix, _always),
    Swap(MaskedSquares, "masked_mse", "forward", fused_squares, _always),
    Swap(PrepareImages, "image_prep", "forward", fused_images, _always),
    Swap(NormalizeImages, "image_prep", "forward", fused_normalized, _always),
)


def table(context: Context) -> tuple[Swap, ...]:
    return CUDA_TABLE if context.options.device_kind.cuda else cpu_table(context)


class Fuse(Pass):
    name = "fuse"
    numerics = "reorder"
    order = 20

    def decide(self, model: nn.Module, context: Context) -> Decision:
        if context.options.device_kind.cuda or self.sites(model, context):
            return Decision(True, "")
        return Decision(False, "on this CPU the default products are the fastest; the rest is left to compile_blocks")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        swaps = table(context)
        found = []
        for name, module in model.named_modules():
            swap = next((s for s in swaps if s.serves(module) and s.fits(module, context)), None)
            if swap is not None:
                found.append(Site(name, swap.what, (claim(swap.method, name),)))
        return found

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        swaps = table(context)
        for site in sites:
            module = target.get_submodule(site.path)
            swap = next(s for s in swaps if s.what == site.what and s.serves(module))
            setattr(module, swap.method, MethodType(swap.function, module))
