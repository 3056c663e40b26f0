"""flash_attention: attention without a mask, or with a causal one, by the flash-attn package.

On request: SDPA runs the same algorithm from PyTorch's own build, or cuDNN's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.graphs.passes.base import Context, Decision, Pass, Site
from vlaforge.graphs.passes.flex_attention import attention_sites
from vlaforge.models.blocks.executors import flash_attention, flash_installed


class FlashAttention(Pass):
    name = "flash_attention"
    numerics = "reorder"
    order = 24
    default = False

    def decide(self, model: nn.Module, context: Context) -> Decision:
        """UserError when the package is not installed."""
        if not context.options.device_kind.cuda:
            return Decision(False, "needs a CUDA device")
        if "precision" not in context.on or context.options.torch_dtype == torch.float32:
            return Decision(False, "flash-attn computes in bf16 or fp16: add --dtype bf16")
        if not flash_installed():
            raise UserError(
                "--with flash_attention needs the flash-attn package, and it is not installed: "
                "pip install 'vlaforge[flash-attn]', or leave the pass out (SDPA then runs PyTorch's own kernels)."
            )
        sites = attention_sites(model, "plain")
        return Decision(True, f"{self.describe(sites)}: calls without padding")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        return attention_sites(model, "plain")

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            target.get_submodule(site.path).plain = flash_attention
