"""Wan's video VAE 2.2, frozen: pixels → latents (48 channels, 16× in space, 4× in time) and back, through diffusers.

Frame 0 is encoded alone and gives latent frame 0, then each 4 frames give one more; it is causal, so the latent of a
first frame is the same whatever follows. Latents leave as (mode - mean) / std with Wan's published vectors.

Axes: B samples, T pixel frames (1 + 4k), H W pixels, C latent channels, F latent frames (1 + k), h w latent pixels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.data.ranges import ranged
from vlaforge.models.convert import Layout
from vlaforge.models.video.frozen import FrozenEncoder
from vlaforge.models.video.names import vae22_layouts

MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip


@dataclass(frozen=True)
class VaeConfig:
    """Sizes of the VAE (defaults: Wan 2.2, 704.7 M parameters) and where its weights are.

    Args:
        path: ``Wan2.2_VAE.pth`` (official), a ``.safetensors`` under either naming, or a folder with one of them.
        seed: random weights instead, for runs without downloads.
        dtype: of its weights and arithmetic.
    """

    path: str = ""
    seed: int | None = ranged(None, low=0, high=2**63 - 1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    base_dim: int = 160
    decoder_base_dim: int = 256
    z_dim: int = 48
    dim_mult: tuple[int, ...] = ranged((1, 2, 4, 4), low=1)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    in_channels: int = 12
    patch_size: int = 2

    @property
    def spatial(self) -> int:
        """Pixels of a latent pixel's side: 2 for each level but the last, times the patch."""
        return self.patch_size * 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal(self) -> int:
        """Pixel frames of a latent frame after the first."""
        return 2 ** sum(self.temporal_downsample)

    def sizes(self) -> dict:
        """What decides the latents, apart from the weights: for cache manifests."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "seed")}


class WanVae(FrozenEncoder):
    """Encodes and decodes with `VaeConfig`'s network."""

    def __init__(self, config: VaeConfig, setting: str = "model.vae.path"):
        super().__init__(
            "Wan VAE 2.2",
            config.path,
            config.seed,
            config.dtype,
            ("Wan2.2_VAE.pth", "vae/diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors"),
            setting,
        )
        if len(MEAN_22) != config.z_dim:
            raise UserError(
                f"model.vae.z_dim is {config.z_dim}, but the published statistics have {len(MEAN_22)} channels."
            )
        self.config = config

    def build(self) -> nn.Module:
        try:
            from diffusers import AutoencoderKLWan
        except ImportError as error:
            raise UserError("The Wan VAE needs diffusers: pip install 'vlaforge[diffusers]'.") from error
        c = self.config
        return AutoencoderKLWan(
            base_dim=c.base_dim,
            decoder_base_dim=c.decoder_base_dim,
            z_dim=c.z_dim,
            dim_mult=list(c.dim_mult),
            num_res_blocks=c.num_res_blocks,
            temperal_downsample=list(c.temporal_downsample),
            latents_mean=list(MEAN_22),
            latents_std=list(STD_22),
            is_residual=True,
            in_channels=c.in_channels,
            out_channels=c.in_channels,
            patch_size=c.patch_size,
            scale_factor_spatial=c.spatial,
            scale_factor_temporal=c.temporal,
        )

    def layouts(self) -> dict[str, Layout]:
        return vae22_layouts(self.config.num_res_blocks)

    @torch.no_grad()
    def encode(self, video_BCTHW: Tensor) -> Tensor:
        """Pixels in [-1, 1], float [B, 3, T, H, W], T = 1 + 4k → normalised latents fp32 [B, C, F, h, w]."""
        t, side = video_BCTHW.shape[2], self.config.spatial
        if (t - 1) % self.config.temporal or any(size % side for size in video_BCTHW.shape[3:]):
            raise ValueError(
                f"the VAE encodes 1 + {self.config.temporal}k frames whose sides are multiples of {side}, "
                f"not {t} frames of {list(video_BCTHW.shape[3:])}"
            )
        net = self.net(video_BCTHW.device)
        modes = [net.encode(one[None].to(self.dtype)).latent_dist.mode().float() for one in video_BCTHW]
        mean, std = self._statistics(video_BCTHW.device)
        return (torch.cat(modes) - mean) / std

    @torch.no_grad()
    def decode(self, latents_BCFhw: Tensor) -> Tensor:
        """Normalised latents → pixels in [-1, 1], fp32 [B, 3, T, H, W]."""
        mean, std = self._statistics(latents_BCFhw.device)
        raw = (latents_BCFhw.float() * std + mean).to(self.dtype)
        return torch.cat([self.net(raw.device).decode(one[None]).sample.float() for one in raw])

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = (1, -1, 1, 1, 1)
        return tuple(torch.tensor(values, device=device).view(shape) for values in (MEAN_22, STD_22))
