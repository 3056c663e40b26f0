"""Every flag of the LoongForge-Embodied manual, with its default."""

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
NOT_YET = {name for name in MANUAL if name.startswith(("ddp-", "fsdp-", "zero-", "hsdp-", "distributed-strategy"))}
"""Flags of functions that do not exist yet: they are unknown until they do something."""


@pytest.mark.parametrize("name", [name for name in MANUAL if name not in NOT_YET or name in FLAGS])
def test_flag_and_default(name):
    assert name in FLAGS, f"--{name} of the manual is missing"
    default = FLAGS[name].default
    assert (default or None) == (MANUAL[name] or None) if MANUAL[name] in ("", None) else default == MANUAL[name]


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_choices(name):
    assert CHOICES[name] <= set(FLAGS[name].meta["choices"])
