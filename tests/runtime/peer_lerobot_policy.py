"""LeRobot's own policy class on an exported checkpoint: raw observations in, actions in robot units out.

Runs in an interpreter that has LeRobot (0.6.1), without vlaforge, called by test_export.py:

    python peer_lerobot_policy.py JOB.json

Nothing of the official code is changed but the sizes of π0.5's towers and of GR00T's backbone (it hard-codes the
published ones), where it looks for a tokenizer (with GR00T also for the chat template and the image processor's
settings) or FastWAM's encoders, and the noise of all but π0.5, which is given. Configuration, weights, and both
processor pipelines come from the export's folder; GR00T's policy is built on the export in NVIDIA's layout, whose own
files say the same.
"""

import copy
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def peer(root, name):
    """A script of bench/peers as a module; they import each other by name."""
    sys.path.insert(0, str(Path(root) / "bench" / "peers"))
    return importlib.import_module(name)


def tokenizer_of(path, marks, side="right"):
    """`marks` stand around the text."""
    raw = Tokenizer.from_file(path)
    before, after = marks
    words = " ".join(filter(None, (before, "$A", after)))
    named = [(mark, raw.token_to_id(mark)) for mark in marks if mark]
    raw.post_processor = TemplateProcessing(single=words, special_tokens=named)
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", padding_side=side)


def pi05(job):
    """(policy, what predicts a chunk from a batch and its noise, both pipelines)"""
    peer(job["root"], "lerobot_pi05").set_sizes(job["sizes"])
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    policy = PI05Policy.from_pretrained(job["export"], strict=True, local_files_only=True)
    return policy, lambda batch, noise: policy.predict_action_chunk(batch, noise=noise), *stored_pipelines(job)


def xvla(job):
    from lerobot.policies.xvla import modeling_xvla as official

    policy = official.XVLAPolicy.from_pretrained(job["export"], strict=True, local_files_only=True)

    official.torch = drawn = peer(job["root"], "lerobot_step").GivenNoise()

    def predict(batch, noise):
        drawn.normal = [noise]
        return policy.predict_action_chunk(batch)

    return policy, predict, *stored_pipelines(job)


CHAT = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{% for part in turn.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
"""Qwen3-VL's published chat template, as far as GR00T's prompts go."""


def groot_n1_7(job):
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.groot import groot_n1_7 as official
    from lerobot.policies.groot import modeling_groot, processor_groot
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    step, sizes = peer(job["root"], "lerobot_groot_n1_7"), job["sizes"]
    vision, tokenizer = sizes["vision"], tokenizer_of(job["tokenizer"], job["marks"], "left")
    patches = {
        "patch_size": vision["patch"], "temporal_patch_size": vision["frames"], "merge_size": vision["merge"],
        "size": {"shortest_edge": 1, "longest_edge": 2**24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(**patches), tokenizer, Qwen3VLVideoProcessor(**patches), chat_template=CHAT
    )
    official._is_cosmos_reason2_backbone = lambda name: True
    official._cosmos_reason2_qwen3_vl_config = lambda: step.backbone_config(sizes)
    processor_groot._build_n1_7_processor = lambda name: processor
    config = PreTrainedConfig.from_pretrained(job["export"])
    config.base_model_path, config.use_bf16 = job["base"], False
    create = modeling_groot.GrootPolicy._create_groot_model

    def emptied(policy):
        """NVIDIA's layout loads (in bf16, officially); then all weights are zeros, so that LeRobot's must hold them."""
        model = create(policy)
        held = model.state_dict()
        for name, value in load_file(Path(job["base"]) / "model.safetensors").items():
            assert torch.equal(held[name], value.bfloat16().float()), name
        for value in held.values():
            value.zero_()
        return model

    modeling_groot.GrootPolicy._create_groot_model = emptied
    policy = modeling_groot.GrootPolicy.from_pretrained(job["export"], config=config, strict=True)
    pipelines = [
        processor_groot.make_groot_pre_post_processors_from_pretrained(config, job[folder])
        for folder in ("export", "base")
    ]

    def alike(first, second):
        def run(given):
            found = [first(copy.copy(given)), second(copy.copy(given))]
            a, b = ({"action": value} if isinstance(value, torch.Tensor) else value for value in found)
            assert a.keys() == b.keys()
            for name, value in a.items():
                assert torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name], name
            return found[0]

        return run

    official.torch = drawn = peer(job["root"], "lerobot_step").GivenNoise()

    def predict(batch, noise):
        drawn.normal = [noise]
        return policy.predict_action_chunk(batch)

    return policy, predict, *(alike(*pair) for pair in zip(*pipelines))


def fastwam(job):
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.fastwam import modeling_fastwam as official
    from lerobot.policies.fastwam.wan import components, modular

    components.WAN22_DIFFUSERS_MODEL_ID = job["encoders"]
    tokenizer = tokenizer_of(job["tokenizer"], job["marks"])
    components.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    config = PreTrainedConfig.from_pretrained(job["export"])
    config.text_encoder_model_id = job["encoders"]
    policy = official.FastWAMPolicy.from_pretrained(job["export"], config=config, strict=True, local_files_only=True)
    read = []
    policy.model.text_encoder.register_forward_pre_hook(lambda encoder, given: read.append(given[0]))
    modular.torch = drawn = peer(job["root"], "lerobot_step").GivenNoise()

    def predict(batch, noise):
        drawn.normal = [noise]
        actions = policy.predict_action_chunk(batch)
        batch["input_ids"] = read.pop()  # the policy itself turns text into tokens
        return actions

    return policy, predict, *stored_pipelines(job)


def stored_pipelines(job):
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

    folder = job["export"]
    tokenizer = {"tokenizer_processor": {"tokenizer": tokenizer_of(job["tokenizer"], job["marks"])}}
    before = PolicyProcessorPipeline.from_pretrained(
        folder, "policy_preprocessor.json", overrides={} if job["model"] == "fastwam" else tokenizer
    )
    after = PolicyProcessorPipeline.from_pretrained(
        folder,
        "policy_postprocessor.json",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return before, after


def main(job):
    parts = {"pi05": pi05, "xvla": xvla, "groot_n1_7": groot_n1_7, "fastwam": fastwam}
    policy, predict, before, after = parts[job["model"]](job)
    stored = load_file(Path(job["export"]) / "model.safetensors")
    loaded = policy.state_dict()
    for name, value in stored.items():  # from_pretrained goes on with random weights when loading fails
        assert torch.equal(loaded[name].cpu(), value), name
    given = load_file(job["observations"])
    noise = given.pop("noise")
    results = {}
    for number, task in enumerate(job["tasks"]):
        observation = {name: value[number] for name, value in given.items()}
        batch = before({**observation, "task": task})
        actions = predict(batch, noise[number : number + 1])
        results[f"tokens.{number}"] = batch.get("observation.language.tokens", batch.get("input_ids"))
        results[f"actions.{number}"] = after(actions)
    save_file({name: value.contiguous() for name, value in results.items()}, job["result"])
    print(f"{len(job['tasks'])} observations")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
