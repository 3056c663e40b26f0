"""UMT5, the frozen text encoder of Wan's models, through transformers; and the cleaning of its prompts.

Rows of padding tokens are zero vectors in the result, and the video models attend to them: part of the published
models.

Axes: B samples, L tokens (padded length), D width.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.data.ranges import ranged
from vlaforge.models.convert import Layout
from vlaforge.models.video.frozen import FrozenEncoder
from vlaforge.models.video.names import UMT5_LAYOUTS


@dataclass(frozen=True)
class Umt5Config:
    """Sizes of the encoder (defaults: UMT5-xxl, 5.68 B parameters) and where its weights are.

    Args:
        path: ``models_t5_umt5-xxl-enc-bf16.pth`` (official), transformers' ``model.safetensors`` or its index, or a
            folder with one of them.
        seed: random weights instead, for runs without downloads.
        dtype: of its weights and arithmetic.
    """

    path: str = ""
    seed: int | None = ranged(None, low=0, high=2**63 - 1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    vocab: int = 256384
    dim: int = 4096
    attention_dim: int = 4096
    ffn_dim: int = 10240
    heads: int = 64
    layers: int = 24
    buckets: int = 32

    def sizes(self) -> dict:
        """What decides the context, apart from the weights: for cache manifests."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "seed")}


class Umt5(FrozenEncoder):
    """Encodes token ids with `Umt5Config`'s network."""

    def __init__(self, config: Umt5Config, setting: str = "model.text.path"):
        names = ("model.safetensors.index.json", "model.safetensors")
        super().__init__(
            "UMT5 text encoder",
            config.path,
            config.seed,
            config.dtype,
            ("models_t5_umt5-xxl-enc-bf16.pth", *(f"text_encoder/{name}" for name in names), *names),
            setting,
        )
        self.config = config

    def build(self) -> nn.Module:
        try:
            from transformers import UMT5Config, UMT5EncoderModel
        except ImportError as error:
            raise UserError("The UMT5 encoder needs transformers: pip install 'vlaforge[transformers]'.") from error
        c = self.config
        return UMT5EncoderModel(
            UMT5Config(
                vocab_size=c.vocab,
                d_model=c.dim,
                d_kv=c.attention_dim // c.heads,
                d_ff=c.ffn_dim,
                num_layers=c.layers,
                num_heads=c.heads,
                relative_attention_num_buckets=c.buckets,
                layer_norm_epsilon=1e-6,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                use_cache=False,
            )
        )

    def layouts(self) -> dict[str, Layout]:
        return UMT5_LAYOUTS

    def _load(self, net: nn.Module, official: Mapping[str, Tensor]) -> None:
        net.encoder.embed_tokens = None  # one parameter under two names, 2 GB at full size: loaded once, tied again
        super()._load(net, official)
        net.encoder.embed_tokens = net.shared

    @torch.no_grad()
    def encode(self, tokens_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """int64 ids and bool mask (True on real tokens) [B, L] → fp32 [B, L, D], zero where the mask is False."""
        net = self.net(tokens_BL.device)
        rows = [
            net(input_ids=ids[None], attention_mask=mask[None].long()).last_hidden_state
            for ids, mask in zip(tokens_BL, mask_BL)
        ]
        return torch.cat(rows).float() * mask_BL[..., None]


def clean_prompt(text: str) -> str:
    """Entities resolved twice and white space collapsed, as Wan's tokenizer wrapper does before encoding."""
    return " ".join(html.unescape(html.unescape(text)).split())
