"""The action expert of π0.5: a Gemma stack of its own width that reads a prefix's keys and values, and whose norms are
modulated by the flow-matching time.

Facts: openpi ``gemma_pytorch.py`` and ``pi0_pytorch.py`` (pi05), LeRobot 0.6.1 ``policies/pi05``.

Axes: B samples, H action steps, W width, P prefix tokens, S = P + H, K head width, J = K/2, G key/value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.models.blocks.attention import QKV, Attention, Mask, merge_heads
from vlaforge.models.blocks.mlp import GatedMLP
from vlaforge.models.blocks.modulation import GatedAdd
from vlaforge.models.blocks.norms import AdaRMSNorm
from vlaforge.models.blocks.rotary import Rotary
from vlaforge.models.blocks.time import SinCosTime
from vlaforge.models.towers.gemma import GemmaConfig


class TimeCondition(nn.Module):
    """Time in [0, 1] → the condition of all modulated norms: SiLU(out(SiLU(in(sincos t)))), fp32 [B, W]."""

    def __init__(self, width: int, min_period: float, max_period: float):
        super().__init__()
        self.sincos = SinCosTime(width, min_period, max_period)
        self.time_in = nn.Linear(width, width)
        self.time_out = nn.Linear(width, width)

    def forward(self, time_B: Tensor) -> Tensor:
        embedded_BW = self.sincos(time_B).to(self.time_in.weight.dtype)
        return F.silu(self.time_out(F.silu(self.time_in(embedded_BW))))


class ExpertLayer(nn.Module):
    """y + gate · attn(AdaRMS y), y + gate · GeGLU(AdaRMS y); queries see the valid prefix and every action token."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        width = config.width
        self.input_norm = AdaRMSNorm(width, width, config.eps)
        self.qkv = QKV(width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.rotary = Rotary()
        self.attend = Attention()
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=False)
        self.post_norm = AdaRMSNorm(width, width, config.eps)
        self.mlp = GatedMLP(width, config.mlp_dim, "gelu_tanh")
        self.add = GatedAdd()

    def forward(
        self,
        y_BHW: Tensor,
        condition_BW: Tensor,
        cos_BHJ: Tensor,
        sin_BHJ: Tensor,
        prefix_k_BGPK: Tensor,
        prefix_v_BGPK: Tensor,
        keys_BS: Tensor,
    ) -> Tensor:
        """`keys` is True on the valid keys of [prefix, actions]; the tables are those of the action positions."""
        normed_BHW, gate_B1W = self.input_norm(y_BHW, condition_BW)
        q, k, v = self.qkv(normed_BHW)
        q, k = self.rotary(q, cos_BHJ, sin_BHJ), self.rotary(k, cos_BHJ, sin_BHJ)
        k_BGSK, v_BGSK = torch.cat([prefix_k_BGPK, k], dim=2), torch.cat([prefix_v_BGPK, v], dim=2)
        mixed = self.attend(q, k_BGSK, v_BGSK, Mask.padding(keys_BS))
        y_BHW = self.add(y_BHW, self.o_proj(merge_heads(mixed)), gate_B1W)
        normed_BHW, gate_B1W = self.post_norm(y_BHW, condition_BW)
        return self.add(y_BHW, self.mlp(normed_BHW), gate_B1W)
