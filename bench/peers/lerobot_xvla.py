"""LeRobot's own X-VLA in LeRobot's own step: the other side of `forge-bench train --model xvla --peer lerobot`.

Nothing of the official code is changed but the sizes of the towers, the source of noise and times (given, so that both
sides compute the same loss), and dropout, which is off on both sides. Images come normalised, as its processor hands
them over.
"""

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.xvla import modeling_xvla as official
from lerobot.policies.xvla.configuration_xvla import XVLAConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_LANGUAGE_TOKENS, OBS_STATE
from lerobot_step import GivenNoise, Trainer, main
from safetensors.torch import load_file

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def florence(config):
    """The job's towers in transformers' words."""
    vision, text = config["vision"], config["text"]
    return {
        "vision_config": {
            "embed_dim": vision["dims"], "depths": vision["depths"], "num_heads": vision["heads"],
            "num_groups": vision["groups"], "patch_size": vision["kernels"], "patch_stride": vision["strides"],
            "patch_padding": vision["paddings"], "patch_prenorm": vision["prenorm"], "window_size": vision["window"],
            "mlp_ratio": vision["mlp_ratio"], "drop_path_rate": vision["drop_path"], "projection_dim": text["width"],
            "max_position_embeddings": config["image_positions"], "max_temporal_embeddings": config["image_frames"],
        },
        "text_config": {
            "vocab_size": text["vocab_size"], "d_model": text["width"], "pad_token_id": text["pad_token"],
            "encoder_layers": text["layers"], "encoder_attention_heads": text["heads"], "encoder_ffn_dim": text["mlp"],
            "decoder_layers": 1, "decoder_attention_heads": text["heads"], "decoder_ffn_dim": text["mlp"],
            "max_position_embeddings": text["max_positions"], "dropout": text["dropout"],
            "attention_dropout": text["attention_dropout"], "activation_dropout": text["activation_dropout"],
        },
    }  # fmt: skip


class XVLA(Trainer):
    def build_policy(self, job):
        config = job["config"]
        size = config["image_size"]
        inputs = {
            f"{OBS_IMAGES}.view{i}": PolicyFeature(type=FeatureType.VISUAL, shape=(3, size, size))
            for i in range(config["num_image_views"])
        }
        inputs[OBS_STATE] = PolicyFeature(type=FeatureType.STATE, shape=(config["max_state_dim"],))
        width = config["action_dim"] or config["max_action_dim"]
        policy_config = XVLAConfig(
            device="cpu",
            dtype=job["dtype"],
            input_features=inputs,
            output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(width,))},
            chunk_size=config["action_horizon"],
            n_action_steps=config["action_horizon"],
            florence_config=florence(config),
            tokenizer_max_length=config["max_token_len"],
            hidden_size=config["hidden_size"],
            depth=config["depth"],
            num_heads=config["num_heads"],
            mlp_ratio=config["mlp_ratio"],
            num_domains=config["num_domains"],
            len_soft_prompts=config["len_soft_prompts"],
            dim_time=config["dim_time"],
            max_len_seq=config["max_len_seq"],
            use_hetero_proj=config["use_hetero_proj"],
            action_mode=config["action_mode"],
            max_state_dim=config["max_state_dim"],
            max_action_dim=config["max_action_dim"],
            num_image_views=config["num_image_views"],
            domain_feature_key="domain_id",
            **job["options"],
        )
        policy = official.XVLAPolicy(policy_config)
        for block in policy.model.transformer.blocks:
            block.attn.attn_drop.p = config["attn_dropout"]
            block.mlp.drop1.p = block.mlp.drop2.p = config["mlp_dropout"]
        weights = load_file(job["weights"])
        table = "model.vlm.language_model.shared.weight"
        weights.setdefault("model.vlm.language_model.encoder.embed_tokens.weight", weights[table])
        policy.load_state_dict(weights, strict=True)
        official.torch = self.drawn = GivenNoise()
        return policy

    def read_batch(self, path, job):
        fields, width = load_file(path), job["config"]["action_dim"]
        images = fields["images"].permute(0, 1, 4, 2, 3).float().div(255.0)
        images = (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        filled = int(fields["image_mask"][0].sum())
        batch = {f"{OBS_IMAGES}.view{i}": images[:, i].contiguous() for i in range(filled)}
        batch[OBS_LANGUAGE_TOKENS], batch[OBS_STATE] = fields["tokens"], fields["state"]
        batch["domain_id"], batch[ACTION] = fields["embodiment"], fields["actions"][..., :width].contiguous()
        return batch, (fields["draw.noise"], fields["draw.time"])

    def give(self, drawn):
        noise, time_B = drawn
        self.drawn.normal, self.drawn.uniform = [noise], [time_B[:1]]  # the others' times are spread from the first

    def options(self):
        config = self.policy.config
        names = ("dtype", "freeze_vision_encoder", "freeze_language_encoder", "num_image_views")
        attention = self.model.vlm.config._attn_implementation
        return {**{name: getattr(config, name) for name in names}, "dropout": 0.0, "attention": attention}


if __name__ == "__main__":
    main(XVLA)
