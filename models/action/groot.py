"""GR00T's action head, shared by N1.6 and N1.7: embodiment MLPs around an alternating cross/self-attention DiT.

Facts: NVIDIA/Isaac-GR00T ``gr00t_n1d6.py``, ``gr00t_n1d7.py``.

Axes: B samples, H action steps, A action and S state width, T = 1 + H tokens, D width of the DiT; M context tokens
of width C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlaforge.models.action.dit import Context, ContextBlock, ContextConfig, DiT, DiTConfig, bucket_waves
from vlaforge.models.action.embodiment import EmbodimentLinear, EmbodimentMLP
from vlaforge.models.blocks.attention import Mask
from vlaforge.models.blocks.dropout import Dropout


class ActionEncoder(nn.Module):
    """a = W1 x; W3 swish(W2 [a; waves(bucket)]), each W by embodiment."""

    def __init__(self, embodiments: int, action: int, width: int):
        super().__init__()
        self.width = width
        self.w1 = EmbodimentLinear(embodiments, action, width)
        self.w2 = EmbodimentLinear(embodiments, 2 * width, width)
        self.w3 = EmbodimentLinear(embodiments, width, width)

    def forward(self, x_BHA: Tensor, bucket_B: Tensor, embodiment_B: Tensor) -> Tensor:
        encoded = self.w1(x_BHA, embodiment_B)
        waves_BD = bucket_waves(bucket_B, self.width, shift=0.0, cos_first=False).to(encoded.dtype)
        joined = torch.cat([encoded, waves_BD[:, None].expand_as(encoded)], dim=-1)
        return self.w3(F.silu(self.w2(joined, embodiment_B)), embodiment_B)


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the head. `state` is the width of the whole state history; `drop_token`: a dropped state becomes a
    learned token (N1.6) rather than zero (N1.7)."""

    state: int
    action: int
    horizon: int
    hidden: int
    embodiments: int
    max_positions: int
    dit: DiTConfig
    context: ContextConfig | None
    position_embedding: bool = True
    norm_context: bool = True
    drop_token: bool = False
    state_dropout: float = 0.0
    mask_context_padding: bool = False


class GrootHead(nn.Module):
    """State and noisy actions → velocity, conditioned on the encoded context and the embodiment."""

    def __init__(self, config: HeadConfig, salts: Iterator[int]):
        super().__init__()
        self.config = config
        width, context = config.dit.width, config.dit.context
        self.state_encoder = EmbodimentMLP(config.embodiments, config.state, config.hidden, width)
        self.action_encoder = ActionEncoder(config.embodiments, config.action, width)
        self.action_decoder = EmbodimentMLP(config.embodiments, config.dit.output, config.hidden, config.action)
        self.norm_context = nn.LayerNorm(context) if config.norm_context else nn.Identity()
        depth = config.context.layers if config.context else 0
        self.context_blocks = nn.ModuleList(ContextBlock(context, config.context, salts) for _ in range(depth))
        self.dit = DiT(config.dit, salts)
        if config.position_embedding:
            self.positions = nn.Parameter(torch.randn(config.max_positions, width) * 0.02)
        if config.drop_token:
            self.state_token = nn.Parameter(torch.zeros(width))
        self.drop_state = Dropout(config.state_dropout, next(salts), whole_sample=True)

    def read_context(self, features_BMC, valid_BM, image_BM, image_tokens=None, seed_B=None) -> Context:
        """Normalises and mixes the backbone's features. Padding takes part unless `mask_context_padding`."""
        tokens_BMC = self.norm_context(features_BMC)
        mask = Mask.padding(valid_BM) if self.config.mask_context_padding else None
        for block in self.context_blocks:
            tokens_BMC = block(tokens_BMC, mask, seed_B)
        return Context.of(tokens_BMC, valid_BM, image_BM, image_tokens)

    def encode_state(self, state_BS: Tensor, embodiment_B: Tensor, seed_B: Tensor | None = None) -> Tensor:
        """[B, S] → [B, 1, D]; in training a whole state may be dropped (not scaled up elsewhere)."""
        weight_dtype = self.state_encoder.layer1.table.dtype
        features_B1D = self.state_encoder(state_BS[:, None].to(weight_dtype), embodiment_B)
        if not self.drop_state.active(seed_B):
            return features_B1D
        keep = self.drop_state.keep(seed_B, (1, 1))
        token = self.state_token if self.config.drop_token else torch.zeros_like(features_B1D[0, 0])
        return torch.where(keep, features_B1D, token.to(features_B1D.dtype))

    def velocity(self, x_BHA, bucket_B, state_B1D, embodiment_B, keys_values, context, seed_B=None) -> Tensor:
        """The velocity [B, H, A] at noisy actions `x` and time bucket."""
        weight_dtype = self.action_encoder.w1.table.dtype
        tokens_BHD = self.action_encoder(x_BHA.to(weight_dtype), bucket_B, embodiment_B)
        if self.config.position_embedding:
            tokens_BHD = tokens_BHD + self.positions[: tokens_BHD.shape[1]]
        joined_BTD = torch.cat([state_B1D, tokens_BHD], dim=1)
        out = self.dit(joined_BTD, bucket_B, keys_values, context, seed_B)
        # Only the action tokens are decoded; the state token's decoding is never used.
        return self.action_decoder(out[:, 1:], embodiment_B)
