"""LeRobot's own FastWAM in LeRobot's own step: the other side of `forge-bench train --model fastwam --peer lerobot`.

Nothing of the official code is changed but the sizes, the source of noise and times (given, so that both sides
compute the same loss), and the encoders: on both sides latents and text embeddings are given.
"""

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.fastwam import modeling_fastwam as official
from lerobot.policies.fastwam.configuration_fastwam import (
    FastWAMConfig,
    default_action_dit_config,
    default_video_dit_config,
)
from lerobot.policies.fastwam.wan import modular
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from lerobot_step import GivenNoise, Trainer, main
from safetensors.torch import load_file


class GivenLatents(torch.nn.Module):
    """In place of the VAE: hands out the batch's latents."""

    temporal_downsample_factor = 4

    def encode(self, *args, **kwargs):
        return self.latents


class FastWAM(Trainer):
    def build_policy(self, job):
        config = job["config"]
        official.require_package = lambda *args, **kwargs: None  # diffusers serves the VAE, which does not run here
        official.load_pretrained_wan_vae = lambda **kwargs: GivenLatents()
        official.build_wan_tokenizer = lambda **kwargs: None
        modular.torch = self.drawn = GivenNoise()
        shared = {
            "num_heads": config["heads"], "attn_head_dim": config["head_dim"], "num_layers": config["layers"],
            "text_dim": config["text_dim"], "freq_dim": config["freq_dim"], "eps": config["eps"],
        }  # fmt: skip
        channels, actions = config["latent_channels"], config["max_action_dim"]
        video = {
            **default_video_dit_config(actions), **shared, "in_dim": channels, "out_dim": channels,
            "hidden_dim": config["video"]["dim"], "ffn_dim": config["video"]["ffn_dim"],
        }  # fmt: skip
        action = {
            **default_action_dit_config(actions), **shared,
            "hidden_dim": config["action"]["dim"], "ffn_dim": config["action"]["ffn_dim"],
        }  # fmt: skip
        size, frames = (config["height"], config["width"]), config["video_frames"]
        ratio = config["action_horizon"] // (frames - 1)
        policy_config = FastWAMConfig(
            device="cpu",
            torch_dtype=job["dtype"],
            action_dim=actions,
            proprio_dim=config["max_state_dim"],
            action_horizon=config["action_horizon"],
            n_action_steps=config["action_horizon"],
            num_video_frames=(frames - 1) * ratio + 1,
            action_video_freq_ratio=ratio,
            image_size=size,
            video_dit_config=video,
            action_dit_config=action,
            load_text_encoder=False,
            base_model_id=None,
            input_features={
                f"{OBS_IMAGES}.canvas": PolicyFeature(type=FeatureType.VISUAL, shape=(3, *size)),
                OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=(config["max_state_dim"],)),
            },
            output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(actions,))},
            **job["options"],
        )
        policy = official.FastWAMPolicy(policy_config)
        policy.load_state_dict(load_file(job["weights"]), strict=True)
        return policy

    def read_batch(self, path, job):
        fields, config = load_file(path), job["config"]
        b, valid = fields["latents"].shape[0], fields["token_mask"]
        batch = {
            "video": torch.zeros(b, 3, config["video_frames"], config["height"], config["width"]),
            "context": fields["context"] * valid[..., None],
            "context_mask": torch.ones_like(valid),
            OBS_STATE: fields["state"],
            ACTION: torch.where(fields["action_mask"], fields["actions"], fields["action_fill"]),
            "action_is_pad": ~fields["action_mask"].any(-1),
            "image_is_pad": ~fields["frame_mask"],
        }
        names = ("draw.video_noise", "draw.noise", "draw.video_time", "draw.time")
        return batch, (fields["latents"], *(fields[name] for name in names))

    def give(self, drawn):
        latents, video_noise, noise, video_u, u = drawn
        self.model.vae.latents = latents.to(self.model.torch_dtype)
        self.drawn.normal = [video_noise, noise]
        for scheduler, uniform in ((self.model.train_video_scheduler, video_u), (self.model.train_action_scheduler, u)):
            time = scheduler._phi(uniform, scheduler.shift) * scheduler.num_train_timesteps
            scheduler.sample_training_t = lambda batch_size, device, dtype, time=time: time.to(dtype)

    def options(self):
        config = self.policy.config
        names = ("use_gradient_checkpointing", "mot_checkpoint_mixed_attn", "fp32_attention")
        return {name: getattr(config, name) for name in names}


if __name__ == "__main__":
    main(FastWAM)
