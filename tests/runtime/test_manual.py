"""Every flag of the LoongForge-Embodied manual, with its default, and the flags that its code has beyond that."""

from __future__ import annotations

import pytest

from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.flags import flags_of

MANUAL = {
    "model-name": None, "config-file": None, "tokenizer-path": None,
    "dataset-format": "lerobot_datasets", "dataset-path": None, "split": "train", "num-samples": 100,
    "lerobotdataset-version": "v3.0", "dataset-strategy": "default", "video-backend": "torchcodec", "robot-type": None,
    "num-workers": 4, "dataloader-seed-workers": False, "dataloader-multiprocessing-context": None,
    "distributed-sampler-mode": "cyclic", "streaming": False,
    "train-iters": 150_000, "per-device-batch-size": 4, "gradient-accumulation-steps": 1, "seed": 3047,
    "output-dir": "outputs/default",
    "lr-base": 2.5e-5, "lr-decay-style": "cosine_with_min_lr", "lr-warmup-iters": 2000, "lr-decay-iters": None,
    "min-lr": 1e-6, "clip-grad": 1.0, "weight-decay": 0.01, "weight-decay-grouping": "all", "optimizer": "AdamW",
    "lr-group": None,
    "pretrained-checkpoint": None, "resume": False, "save-interval": 10_000, "save-format": "safetensors",
    "save-training-state": True, "async-save": False,
    "log-interval": 1, "detail-log-interval": 20, "timing-log-level": 0, "wandb-project": "loongforge",
    "wandb-mode": "disabled", "tensorboard-dir": None, "loss-log-rank": (-1,),
    "freeze-modules": "",
    "trainer-type": "FinetuneTrainer",
    "distributed-strategy": "fsdp", "dtype": "bfloat16", "zero-optimizer": False, "hsdp-shard-size": None,
    "ddp-find-unused-parameters": True, "ddp-static-graph": False, "ddp-gradient-as-bucket-view": False,
    "ddp-bucket-cap-mb": None, "zero-parameters-as-bucket-view": False, "zero-master-param-dtype": "none",
    "fsdp-reshard-default": None, "fsdp-reshard-root": "false", "fsdp-wrap-modules": None,
    "fsdp-no-wrap-modules": None, "fsdp-min-num-params": 1_000_000, "fsdp-leftover-min-num-params": 1_000_000,
    "fsdp-original-param-dtype": None, "fsdp-unsharded-param-dtype": None, "fsdp-reduce-dtype": "fp32",
    "fsdp-cast-forward-inputs": True,
    "loss-spike-threshold": 100.0, "check-for-nan-in-loss-and-grad": True, "deterministic-mode": False,
    "disable-tf32": False, "manual-gc": False, "manual-gc-interval": 0,
}  # fmt: skip
BEYOND = {
    "set-seed-by-rank": False, "lambda-f-max": 0.4, "lambda-f-min": 0.0, "lambda-f-start": 0.0,
    "lambda-cycle-length": 10_000, "lr-end": 1e-7, "polynomial-power": 1.0, "num-cycles": 1.0,
    "adam-beta1": 0.9, "adam-beta2": 0.95, "adam-eps": 1e-8, "sampler-shuffle": True, "batch-drop-last": False,
    "use-lora": False, "lora-r": 16, "lora-alpha": 32, "lora-dropout": 0.0, "lora-target-modules": None,
    "lora-modules-to-save": None, "lora-bias": "none", "lora-init": "true", "tensorboard-queue-size": 1000,
    "use-pytorch-profiler": False, "use-nsys-profiler": False, "profile-step-start": 10, "profile-step-end": 12,
    "profile-ranks": (0,), "profile-output-dir": None,
    "cuda-graph-impl": "none", "cuda-graph-scope": "full_iteration", "cuda-graph-warmup-steps": 3,
    "cuda-graph-pad-length": None, "cuda-graph-ddp-sync-in-graph": False, "cuda-graph-grad-sync-bucket-mb": 200.0,
    "cuda-graph-grad-sync-impl": "coalesced", "cuda-graph-grad-sync-dtype": "fp32",
    "activation-checkpoint-module-patterns": None, "activation-checkpoint-skip-modules": None,
    "init-on-meta": False, "fsdp-reshard-module-overrides": None, "fsdp-forward-prefetch-distance": 0,
    "fsdp-backward-prefetch-distance": 0, "ddp-init-sync": True, "ddp-skip-all-reduce-unused-params": False,
    "ddp-bucket-cap-mb-list": None, "ddp-batched-grad-copy": False, "ddp-comm-hook": None,
}  # fmt: skip
"""What its code has beyond the manual, but for what it never reads (--data-root-dir, --task-name), what is about its
own way of compiling (--dynamo-optimize-ddp; here blocks are compiled, and DDP is around them), and the log of each
bucket (--ddp-comm-hook-logging; `forge-run --plan --world` gives the traffic). Its --ddp-broadcast-buffers is off here:
no model has a buffer that trains."""
CHOICES = {
    "lr-decay-style": {
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "lambda_linear",
    },
    "optimizer": {"AdamW", "TorchFusedAdamW", "TEFusedAdamW", "ApexFusedAdamW", "Adam", "SGD"},
    "dataset-format": {"lerobot_datasets", "hdf5_datasets", "dummy_datasets"},
    "video-backend": {"torchcodec", "decord", "opencv", "pyav", "torchvision_av"},
    "save-format": {"safetensors", "pt", "dcp"},
    "dtype": {"bfloat16", "float16", "float32"},
}  # fmt: skip
FLAGS = {name: entry for entry in flags_of(TrainingArgs) for name in (entry.name, *entry.aliases)}


@pytest.mark.parametrize("name", sorted(MANUAL | BEYOND))
def test_flag_and_default(name):
    wanted = (MANUAL | BEYOND)[name]
    assert name in FLAGS, f"--{name} of LoongForge is missing"
    default = FLAGS[name].default
    assert (default or None) == (wanted or None) if wanted in ("", None) else default == wanted


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_choices(name):
    assert CHOICES[name] <= set(FLAGS[name].meta["choices"])
