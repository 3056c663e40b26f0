"""LeRobot's own GR00T N1.7 in LeRobot's own step: other side of `forge-bench train --model groot_n1_7 --peer lerobot`.

Nothing of the official code is changed but the sizes of the towers, the source of noise and times (given, so that both
sides compute the same loss), and dropout, which is off on both sides. Batches are what its processor hands over:
patches, token ids, masks; the step computes multimodal positions from them.
"""

import importlib.util
import sys
import types

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.groot import groot_n1_7 as official
from lerobot.policies.groot import modeling_groot
from lerobot.policies.groot.configuration_groot import GrootConfig
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_STATE
from lerobot_step import GivenNoise, Trainer, main
from safetensors.torch import load_file
from transformers import Qwen3VLConfig

TUNED = ("tune_llm", "tune_visual", "tune_projector", "tune_diffusion_model", "tune_vlln")


def each_value(function, batch):
    """`tree.map_structure` on a flat batch, where dm-tree is not installed."""
    return type(batch)(data={name: function(value) for name, value in batch.items()})


def backbone_config(config):
    vision, text = config["vision"], config["text"]
    return Qwen3VLConfig(
        image_token_id=config["image_token"],
        vision_start_token_id=config["vision_start_token"],
        vision_end_token_id=config["vision_end_token"],
        tie_word_embeddings=True,
        text_config={
            "vocab_size": text["vocab_size"], "hidden_size": text["width"], "intermediate_size": text["mlp"],
            "num_hidden_layers": text["layers"], "num_attention_heads": text["heads"],
            "num_key_value_heads": text["kv_heads"], "head_dim": text["head_dim"], "rms_norm_eps": text["eps"],
            "rope_theta": text["theta"], "tie_word_embeddings": True,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": text["mrope"], "rope_type": "default"},
        },
        vision_config={
            "hidden_size": vision["width"], "depth": vision["layers"], "num_heads": vision["heads"],
            "intermediate_size": vision["mlp"], "patch_size": vision["patch"], "in_channels": 3,
            "temporal_patch_size": vision["frames"], "spatial_merge_size": vision["merge"],
            "num_position_embeddings": vision["table"] ** 2, "deepstack_visual_indexes": vision["deepstack"],
            "out_hidden_size": vision["output"],
        },
    )  # fmt: skip


def head_config(config):
    dit, context = config["dit"], config["vl_self_attention"]
    shape = {
        name: {"num_layers": part["layers"], "num_attention_heads": part["heads"],
               "attention_head_dim": part["head_dim"], "dropout": part["dropout"], "final_dropout": True,
               "positional_embeddings": None}
        for name, part in (("dit", dit), ("context", context))
    }  # fmt: skip
    same = ("select_layer", "max_state_dim", "max_action_dim", "action_horizon", "hidden_size", "state_history_length",
            "add_pos_embed", "use_vlln", "max_seq_len", "use_alternate_vl_dit", "state_dropout_prob", "noise_s",
            "num_timestep_buckets", "tune_top_llm_layers", *TUNED)  # fmt: skip
    return official.GR00TN17Config(
        **{name: config[name] for name in same},
        max_num_embodiments=config["max_num_embodiments"],
        backbone_embedding_dim=dit["context"],
        input_embedding_dim=dit["heads"] * dit["head_dim"],
        attend_text_every_n_blocks=dit["text_every"],
        diffusion_model_cfg={**shape["dit"], "norm_type": "ada_norm", "output_dim": dit["output"],
                             "interleave_self_attention": True},
        vl_self_attention_cfg=shape["context"],
    )  # fmt: skip


def patches_of(images_MHWC, vision):
    """uint8 images → (values [patches, 3·frames·patch²] in merge order, [M, 3] grids), as Qwen's image processor."""
    p, m, f = vision["patch"], vision["merge"], vision["frames"]
    x = images_MHWC.permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
    count, c, h, w = x.shape
    x = x.view(count, c, h // p // m, m, p, w // p // m, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
    x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, f, -1, -1).reshape(-1, c * f * p * p)
    return x, torch.tensor([[1, h // p, w // p]] * count)


class Groot(Trainer):
    stand_in = False

    def build_policy(self, job):
        config = job["config"]
        if official.tree is None:
            official.tree = types.SimpleNamespace(map_structure=each_value)
            official.require_package = lambda *args, **kwargs: None
            self.stand_in = True
        official._is_cosmos_reason2_backbone = lambda name: True
        official._cosmos_reason2_qwen3_vl_config = lambda: backbone_config(config)
        head = head_config(config)
        build = official.GR00TN17
        modeling_groot.GrootPolicy._create_groot_model = lambda policy: build(head, load_backbone_weights=False)
        size = config["image_size"]
        inputs = {
            f"{OBS_IMAGES}.view{i}": PolicyFeature(type=FeatureType.VISUAL, shape=(3, size, size))
            for i in range(config["num_views"])
        }
        inputs[OBS_STATE] = PolicyFeature(type=FeatureType.STATE, shape=(config["state_dim"],))
        policy = modeling_groot.GrootPolicy(
            GrootConfig(
                device="cpu",
                use_bf16=job["dtype"] == "bfloat16",
                input_features=inputs,
                output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(config["action_dim"],))},
                **{name: config[name] for name in TUNED},
                **job["options"],
            )
        )
        weights = load_file(job["weights"])
        home = "_groot_model.backbone.model"
        weights.setdefault(f"{home}.lm_head.weight", weights[f"{home}.model.language_model.embed_tokens.weight"])
        policy.load_state_dict(weights, strict=True)
        official.torch = self.drawn = GivenNoise()
        return policy

    def precision(self, job):
        return "no"  # the policy has no `dtype`: it opens its own autocast

    def inner(self, policy):
        return policy._groot_model.action_head

    def read_batch(self, path, job):
        fields, config = load_file(path), job["config"]
        patches, grids = patches_of(fields["images"].flatten(0, 1), config["vision"])
        longest = int(fields["token_mask"].sum(1).max())  # its processor pads to the longest of the batch
        batch = {
            "input_ids": fields["tokens"][:, -longest:].contiguous(),
            "attention_mask": fields["token_mask"][:, -longest:].long(),
            "pixel_values": patches,
            "image_grid_thw": grids,
            "state": fields["state"].unflatten(1, (config["state_history_length"], -1)),
            "embodiment_id": fields["embodiment"],
            "action": torch.where(fields["action_mask"], fields["actions"], 0.0),
            "action_mask": fields["action_mask"].float(),
        }
        return batch, (fields["draw.noise"], fields["draw.time"])

    def give(self, drawn):
        noise, time_B = drawn
        self.drawn.normal = [noise]
        self.model.sample_time = lambda size, device, dtype: time_B.to(dtype)

    def options(self):
        import diffusers

        config = self.policy.config
        names = ("use_bf16", "model_params_fp32", "use_flash_attention", *TUNED)
        attention = self.policy._groot_model.backbone.model.config._attn_implementation
        return {
            **{name: getattr(config, name) for name in names},
            "dropout": 0.0, "attention": attention, "diffusers": diffusers.__version__,
            "dm_tree": "a loop over the batch in its place" if self.stand_in else "its own",
        }  # fmt: skip


if __name__ == "__main__":
    if importlib.util.find_spec("diffusers") is None:
        sys.exit(f"LeRobot's groot needs diffusers: {sys.executable} -m pip install 'lerobot[groot]' (or diffusers)")
    main(Groot)
