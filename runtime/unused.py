"""Flags of a command line that nothing in the run reads: each is said, with what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.flags import flags_of
from vlaforge.runtime.launch import world_size

FLOORED = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "openpi_cosine", "lerobot_cosine")
"""Schedules that end at --min-lr."""


def ranks(args: TrainingArgs) -> int:
    """Ranks of the job that this process is of, or starts."""
    return max(args.nproc, world_size())


Rule = tuple[tuple[str, ...], Callable[[TrainingArgs], object], str]
RULES: tuple[Rule, ...] = (
    (("lora_",), lambda a: a.use_lora, "--use-lora"),
    (("new_modules",), lambda a: a.pretrained_checkpoint, "--pretrained-checkpoint"),
    (("export_",), lambda a: a.export, "--export"),
    (("world",), lambda a: a.plan, "--plan"),
    (("device_kind",), lambda a: a.plan or a.dry_run, "--plan or --dry-run"),
    (("max_restarts",), lambda a: a.nproc > 1, "--nproc"),
    (("manual_gc_interval",), lambda a: a.manual_gc, "--manual-gc"),
    (("eval_interval",), lambda a: a.eval_episodes, "--eval-episodes"),
    (("num_samples",), lambda a: a.dataset_format == "dummy_datasets", "--dataset-format dummy_datasets"),
    (
        ("dataset_path", "episodes", "split", "video_backend", "lerobotdataset_version", "tokenizer_path"),
        lambda a: a.dataset_format != "dummy_datasets",
        "another --dataset-format than dummy_datasets",
    ),
    (("dataloader_multiprocessing_context",), lambda a: a.num_workers, "--num-workers above 0"),
    (("sgd_momentum",), lambda a: a.optimizer == "SGD", "--optimizer SGD"),
    (("adam_",), lambda a: a.optimizer != "SGD", "another --optimizer than SGD"),
    (("num_cycles",), lambda a: a.lr_decay_style == "cosine_with_restarts", "--lr-decay-style cosine_with_restarts"),
    (("polynomial_power", "lr_end"), lambda a: a.lr_decay_style == "polynomial", "--lr-decay-style polynomial"),
    (("lambda_",), lambda a: a.lr_decay_style == "lambda_linear", "--lr-decay-style lambda_linear"),
    (("min_lr",), lambda a: a.lr_decay_style in FLOORED, f"--lr-decay-style {', '.join(FLOORED)}"),
    (("wandb_project",), lambda a: a.wandb_mode != "disabled", "--wandb-mode"),
    (("tensorboard_queue_size",), lambda a: a.tensorboard_dir, "--tensorboard-dir"),
    (
        ("profile_ranks", "profile_output_dir", "profile_step_"),
        lambda a: a.profile or a.use_pytorch_profiler or a.use_nsys_profiler,
        "--profile",
    ),
    (
        ("cuda_graph_scope", "cuda_graph_warmup", "cuda_graph_pad", "cuda_graph_ddp", "cuda_graph_grad"),
        lambda a: a.cuda_graph_impl != "none",
        "--cuda-graph-impl local",
    ),
    (
        ("cuda_graph_ddp", "cuda_graph_grad"),
        lambda a: a.distributed_strategy == "ddp",
        "--distributed-strategy ddp",
    ),
    (("zero_parameters", "zero_master"), lambda a: a.zero_optimizer, "--zero-optimizer"),
    (("loss_log_rank",), lambda a: max(a.loss_log_rank, default=-1) < ranks(a), "a job that has those ranks (--nproc)"),
    (("zero_", "ddp_", "fsdp_", "hsdp_"), lambda a: ranks(a) > 1, "several ranks (--nproc)"),
    (("ddp_",), lambda a: a.distributed_strategy == "ddp", "--distributed-strategy ddp"),
    (("fsdp_", "hsdp_"), lambda a: a.distributed_strategy == "fsdp", "--distributed-strategy fsdp"),
    (("save_format", "save_total_limit", "async_save"), lambda a: a.save_interval, "--save-interval above 0"),
)
"""(first letters of field names, whether something reads them, what they wait for)"""


def unused(args: TrainingArgs, spelled: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each flag that was given (`spelled`: field name → the flag as it was typed) in vain."""
    for entry in flags_of(type(args)):
        for names, read, wanted in RULES:
            if entry.field in spelled and entry.field.startswith(names) and not read(args):
                yield f"{spelled[entry.field]} has no effect here: it belongs to {wanted}."
                break
