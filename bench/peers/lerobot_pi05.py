"""LeRobot's own π0.5 in LeRobot's own step: the other side of `forge-bench train --model pi05 --peer lerobot`.

Runs where LeRobot is installed (tried with 0.6.1), without vlaforge; see `bench/peer.py` for the protocol. Nothing of
the official code is changed but the sizes of the towers, the source of noise and time (given, so that both sides
compute the same loss), and the length that prompts are padded to. The step is `lerobot_train.update_policy` (forward,
backward, clip, AdamW, zero_grad, `.item()` of loss and norm) under `accelerate`, with the precision `lerobot_train`
derives from the policy's dtype. Where accelerate is not installed, `Plain` does what it does on one CPU.
"""

import json
import sys
import time
from contextlib import nullcontext

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05 import modeling_pi05 as official
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.constants import ACTION, OBS_IMAGES, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
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


class Plain:
    """The part of `accelerate.Accelerator` that a step on one CPU comes down to."""

    def __init__(self, mixed_precision):
        self.low = mixed_precision == "bf16"

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16) if self.low else nullcontext()

    def prepare(self, *parts):
        return parts

    def unwrap_model(self, model, **kwargs):
        return model

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)


def accelerator(precision):
    try:
        from accelerate import Accelerator
    except ImportError:
        return Plain(precision)
    return Accelerator(step_scheduler_with_optimizer=False, mixed_precision=precision, cpu=True)


class Trainer:
    def __init__(self, job):
        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        self.job = job
        policy = build_policy(job)
        precision = {"bfloat16": "bf16", "float32": "no"}[job["dtype"]]
        self.accelerator = accelerator(precision)
        preset = policy.config.get_optimizer_preset()
        preset.lr, preset.weight_decay, preset.grad_clip_norm = job["lr"], job["weight_decay"], job["clip"]
        optimizer = preset.build(policy.get_optim_params())
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.model = self.accelerator.unwrap_model(self.policy).model
        self.batches = [read_batch(path, job) for path in job["batches"]]
        self.taken = 0
        meters = {name: AverageMeter(name, ":.3f") for name in ("loss", "grad_norm", "lr", "update_s")}
        self.metrics = MetricsTracker(1, 1, 1, meters, initial_step=0)

    def step(self):
        batch, noise, time_B = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        # Padded action dimensions are zeros in the batch and have noise of their own, as on the other side.
        self.model.sample_noise = lambda shape, device: noise
        self.model.sample_time = lambda size, device: time_B
        self.metrics, _ = update_policy(
            self.metrics, self.policy, batch, self.optimizer, self.job["clip"], self.accelerator
        )
        return self.metrics.loss.val

    def run(self, steps):
        seconds, losses = [], []
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(float(self.step()))
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "losses": losses}

    def about(self):
        import lerobot
        import transformers

        dtypes = {}
        for parameter in self.policy.parameters():
            dtypes[str(parameter.dtype)] = dtypes.get(str(parameter.dtype), 0) + parameter.numel()
        return {
            "versions": {
                "torch": torch.__version__,
                "lerobot": lerobot.__version__,
                "transformers": transformers.__version__,
            },
            "parameters": dtypes,
            "optimizer": type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__,
            "gradient_checkpointing": self.policy.config.gradient_checkpointing,
            "compile_model": self.policy.config.compile_model,
            "threads": torch.get_num_threads(),
        }

    def profile(self, path):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.step()
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
        with open(path, "w") as file:
            file.write(table)
        return {"path": path}


def main():
    with open(sys.argv[1]) as file:
        job = json.load(file)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the libraries print must not look like an answer
    trainer = Trainer(job)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "run":
            answer = trainer.run(int(rest))
        elif word == "profile":
            answer = trainer.profile(rest)
        else:
            answer = trainer.about()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
