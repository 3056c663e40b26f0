"""LeRobot's own policy class on an exported checkpoint: raw observations in, actions in robot units out.

Runs in an interpreter that has LeRobot (0.6.1), without vlaforge, called by test_export.py:

    python peer_lerobot_policy.py JOB.json

Nothing of the official code is changed but the sizes of π0.5's towers (it hard-codes the published ones), where it
looks for a tokenizer, and X-VLA's noise, which is given. Configuration, weights, and both processor pipelines come from
the export's folder.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def peer(root, name):
    """A script of bench/peers as a module; they import each other by name."""
    sys.path.insert(0, str(Path(root) / "bench" / "peers"))
    return importlib.import_module(name)


def tokenizer_of(path, marks):
    """`marks` stand around the text."""
    raw = Tokenizer.from_file(path)
    before, after = marks
    words = " ".join(filter(None, (before, "$A", after)))
    named = [(mark, raw.token_to_id(mark)) for mark in marks if mark]
    raw.post_processor = TemplateProcessing(single=words, special_tokens=named)
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", padding_side="right")


def pi05(job):
    """(policy, what predicts a chunk from a batch and its noise)"""
    peer(job["root"], "lerobot_pi05").set_sizes(job["sizes"])
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy

    policy = PI05Policy.from_pretrained(job["export"], strict=True, local_files_only=True)
    return policy, lambda batch, noise: policy.predict_action_chunk(batch, noise=noise)


def xvla(job):
    from lerobot.policies.xvla import modeling_xvla as official

    policy = official.XVLAPolicy.from_pretrained(job["export"], strict=True, local_files_only=True)

    official.torch = drawn = peer(job["root"], "lerobot_step").GivenNoise()

    def predict(batch, noise):
        drawn.normal = [noise]
        return policy.predict_action_chunk(batch)

    return policy, predict


def main(job):
    policy, predict = {"pi05": pi05, "xvla": xvla}[job["model"]](job)
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

    folder = job["export"]
    stored = load_file(Path(folder) / "model.safetensors")
    loaded = policy.state_dict()
    for name, value in stored.items():  # from_pretrained goes on with random weights when loading fails
        assert torch.equal(loaded[name].cpu(), value), name
    before = PolicyProcessorPipeline.from_pretrained(
        folder,
        "policy_preprocessor.json",
        overrides={"tokenizer_processor": {"tokenizer": tokenizer_of(job["tokenizer"], job["marks"])}},
    )
    after = PolicyProcessorPipeline.from_pretrained(
        folder,
        "policy_postprocessor.json",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    given = load_file(job["observations"])
    noise = given.pop("noise")
    results = {}
    for number, task in enumerate(job["tasks"]):
        observation = {name: value[number] for name, value in given.items()}
        batch = before({**observation, "task": task})
        actions = predict(batch, noise[number : number + 1])
        results[f"tokens.{number}"] = batch["observation.language.tokens"]
        results[f"actions.{number}"] = after(actions)
    save_file({name: value.contiguous() for name, value in results.items()}, job["result"])
    print(f"{len(job['tasks'])} observations")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
