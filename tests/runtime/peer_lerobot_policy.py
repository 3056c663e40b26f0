"""LeRobot's own policy class on an exported checkpoint: raw observations in, actions in robot units out.

Runs in an interpreter that has LeRobot (0.6.1), without vlaforge, called by test_export.py:

    python peer_lerobot_policy.py JOB.json

Nothing of the official code is changed but the sizes of its towers (it hard-codes the published ones) and where it
looks for a tokenizer. Configuration, weights, and both processor pipelines come from the export's folder.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def official(root):
    """`set_sizes` of the benchmark's peer, which patches the sizes of LeRobot's towers."""
    spec = importlib.util.spec_from_file_location("peer", Path(root) / "bench" / "peers" / "lerobot_pi05.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokenizer_of(path):
    raw = Tokenizer.from_file(path)
    bos = "<bos>"
    raw.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, raw.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=bos, pad_token="<pad>", padding_side="right")


def main(job):
    peer = official(job["root"])
    peer.set_sizes(job["sizes"])
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

    folder = job["export"]
    policy = PI05Policy.from_pretrained(folder, strict=True, local_files_only=True)
    stored = load_file(Path(folder) / "model.safetensors")
    loaded = policy.state_dict()
    for name, value in stored.items():  # from_pretrained goes on with random weights when loading fails
        assert torch.equal(loaded[name].cpu(), value), name
    before = PolicyProcessorPipeline.from_pretrained(
        folder,
        "policy_preprocessor.json",
        overrides={"tokenizer_processor": {"tokenizer": tokenizer_of(job["tokenizer"])}},
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
        actions = policy.predict_action_chunk(batch, noise=noise[number : number + 1])
        results[f"tokens.{number}"] = batch["observation.language.tokens"]
        results[f"actions.{number}"] = after(actions)
    save_file({name: value.contiguous() for name, value in results.items()}, job["result"])
    print(f"{len(job['tasks'])} observations")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
