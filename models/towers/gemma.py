"""Gemma's decoder layer over a bidirectional prefix: it returns its keys and values beside its output.

Facts: Gemma (arXiv 2403.08295), PaliGemma (arXiv 2407.07726), transformers ``models/gemma``. The defaults are Gemma-2B.

Axes: B samples, P tokens, D width, H query heads, G key/value heads, K head width, J = K/2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vlaforge.models.blocks.attention import QKV, Attention, Mask, merge_heads
from vlaforge.models.blocks.mlp import GatedMLP
from vlaforge.models.blocks.norms import RMSNorm
from vlaforge.models.blocks.rotary import Rotary


@dataclass(frozen=True)
class GemmaConfig:
    """One Gemma stack. `eps` is of all norms, `theta` of the rotary embedding."""

    width: int = 2048
    depth: int = 18
    mlp_dim: int = 16384
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256
    eps: float = 1e-6
    theta: float = 10000.0


class GemmaLayer(nn.Module):
    """Pre-norm: x + attn(RMS x), x + GeGLU(RMS x); every query sees every valid key."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        self.input_norm = RMSNorm(config.width, config.eps, offset=1.0)
        self.qkv = QKV(config.width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.rotary = Rotary()
        self.attend = Attention()
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.width, bias=False)
        self.post_norm = RMSNorm(config.width, config.eps, offset=1.0)
        self.mlp = GatedMLP(config.width, config.mlp_dim, "gelu_tanh")

    def forward(
        self, x_BPD: Tensor, cos_BPJ: Tensor, sin_BPJ: Tensor, valid_BP: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x [B, P, D], keys [B, G, P, K] with their rotation, values [B, G, P, K])."""
        q_BHPK, k_BGPK, v_BGPK = self.qkv(self.input_norm(x_BPD))
        q_BHPK, k_BGPK = self.rotary(q_BHPK, cos_BPJ, sin_BPJ), self.rotary(k_BGPK, cos_BPJ, sin_BPJ)
        mixed_BHPK = self.attend(q_BHPK, k_BGPK, v_BGPK, Mask.padding(valid_BP))
        x_BPD = x_BPD + self.o_proj(merge_heads(mixed_BHPK))
        return x_BPD + self.mlp(self.post_norm(x_BPD)), k_BGPK, v_BGPK

    def keys(self, x_BPD: Tensor, cos_BPJ: Tensor, sin_BPJ: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values alone, where nothing reads the layer's output."""
        k_BGPK, v_BGPK = self.qkv.keys(self.input_norm(x_BPD))
        return self.rotary(k_BGPK, cos_BPJ, sin_BPJ), v_BGPK
