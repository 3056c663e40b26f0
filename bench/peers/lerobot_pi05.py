"""LeRobot's own π0.5 in LeRobot's own step: the other side of `forge-bench train --model pi05 --peer lerobot`.

Nothing of the official code is changed but the sizes of the towers, the source of noise and time (given, so that both
sides compute the same loss), and the length that prompts are padded to.
"""

from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05 import modeling_pi05 as official
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from lerobot_step import Trainer, main
from safetensors.torch import load_file


def set_sizes(config):
    """Has the official constructors build towers of the job's sizes; they hard-code the published ones."""
    towers = {"gemma_2b": config["language"], "gemma_300m": config["expert"]}

    def gemma(variant):
        tower = towers[variant]
        names = ("width", "depth", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        return official.GemmaConfig(**{name: tower[name] for name in names})

    official.get_gemma_config = gemma
    vision, vocabulary = config["vision"], config["vocab_size"]
    pali, expert = official.PaliGemmaForConditionalGenerationWithPiGemma, official.PiGemmaForCausalLM

    def build_pali(config):
        config.text_config.vocab_size = vocabulary
        config._vocab_size = config.image_token_index = vocabulary
        seen = config.vision_config
        seen.hidden_size, seen.num_hidden_layers = vision["width"], vision["depth"]
        seen.num_attention_heads, seen.intermediate_size = vision["num_heads"], vision["mlp_dim"]
        seen.patch_size, seen.projection_dim = vision["patch_size"], config.text_config.hidden_size
        config.projection_dim = config.text_config.hidden_size
        return pali(config=config)

    def build_expert(config):
        config.vocab_size = vocabulary
        return expert(config=config)

    official.PaliGemmaForConditionalGenerationWithPiGemma = build_pali
    official.PiGemmaForCausalLM = build_expert


def build_policy(job):
    config = job["config"]
    set_sizes(config)
    size, views = config["image_size"], config["num_images"]
    inputs = {
        f"{OBS_IMAGES}.view{i}": PolicyFeature(type=FeatureType.VISUAL, shape=(3, size, size)) for i in range(views)
    }
    inputs[OBS_STATE] = PolicyFeature(type=FeatureType.STATE, shape=(config["state_dim"],))
    policy_config = PI05Config(
        device="cpu",
        dtype={"float32": "float32", "bfloat16": "bfloat16"}[job["dtype"]],
        input_features=inputs,
        output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(config["action_dim"],))},
        chunk_size=config["action_horizon"],
        n_action_steps=config["action_horizon"],
        max_action_dim=config["max_action_dim"],
        max_state_dim=config["max_state_dim"],
        tokenizer_max_length=config["max_token_len"],
        image_resolution=(size, size),
        **job["options"],
    )
    policy = official.PI05Policy(policy_config)
    weights = load_file(job["weights"])
    embed = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    weights.setdefault(embed, weights["model.paligemma_with_expert.paligemma.lm_head.weight"])
    policy.load_state_dict(weights, strict=True)
    return policy


def read_batch(path, job):
    """(what a LeRobot loader and its processor hand to the policy, noise, time)."""
    fields = load_file(path)
    filled = int(fields["image_mask"][0].sum())
    batch = {
        f"{OBS_IMAGES}.view{i}": fields["images"][:, i].permute(0, 3, 1, 2).float().div(255.0).contiguous()
        for i in range(filled)
    }
    batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK] = fields["tokens"], fields["token_mask"]
    batch[ACTION] = fields["actions"][..., : job["config"]["action_dim"]].contiguous()
    return batch, fields["draw.noise"], fields["draw.time"]


class Pi05(Trainer):
    def build_policy(self, job):
        return build_policy(job)

    def read_batch(self, path, job):
        batch, *drawn = read_batch(path, job)
        return batch, drawn

    def give(self, drawn):
        # Padded action dimensions are zeros in the batch and have noise of their own, as on the other side.
        noise, time_B = drawn
        self.model.sample_noise = lambda shape, device: noise
        self.model.sample_time = lambda size, device: time_B

    def options(self):
        config = self.policy.config
        return {name: getattr(config, name) for name in ("gradient_checkpointing", "compile_model")}


if __name__ == "__main__":
    main(Pi05)
