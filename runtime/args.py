"""`TrainingArgs`: every flag of ``forge-run``, with its default, meaning and allowed values.

Names and defaults are those of the public LoongForge-Embodied manual where it has the flag. To add one,
declare a field under its group: the command line, the YAML section ``train:``, ``--help``, the checks and the
table in docs/flags.md (made by ``make docs``) follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vlaforge.data.errors import UserError
from vlaforge.runtime.flags import check_values, group

route = group("Model and configuration")
basic = group("Basic training")
rate = group("Learning rate")
optim = group("Optimiser")
guard = group("Stability")
data = group("Data")
save = group("Checkpoints")
lower = group("Precision and lowering")
lora = group("LoRA")
log = group("Logging")
held = group("Evaluation")
trace = group("Profiler")
ranks = group("Distributed")


# fmt: off
@dataclass(frozen=True)
class TrainingArgs:
    """Settings of a run that are not the model's or the data's own. Ranges are checked on construction."""

    model: str | None = route(None, "Model family to train", aliases=["model-name"], example="FAMILY")
    preset: str | None = route(None, "Preset of the family: a YAML file in its folder; unset, the full size",
                               example="NAME")
    recipe: str | None = route(None, "Settings of a published recipe, over the preset, under what you set",
                               example="lerobot|openpi")
    config_file: str | None = route(None, "YAML with sections model, data and train, over the preset",
                                    example="FILE")
    tokenizer_path: str | None = route(None, "A tokenizer.json, or a folder that holds one", example="PATH")
    print_config: bool = route(False, "Print the resolved settings and where each came from, then stop")
    dry_run: bool = route(False, "Check everything and estimate the memory needed, then stop")

    train_iters: int = basic(150_000, "Number of optimiser steps", low=1)
    per_device_batch_size: int = basic(4, "Samples in one forward pass of one process", low=1)
    gradient_accumulation_steps: int = basic(1, "Forward passes summed before each optimiser step", low=1)
    seed: int = basic(3047, "Seed of the initial weights, the sample order and all random inputs", low=0,
                      high=2**63 - 1)
    output_dir: str = basic("outputs/default", "Folder for logs, checkpoints and the report", example="DIR")
    trainer_type: str = basic("FinetuneTrainer", "Step program: what is read and minimised", example="NAME")
    trainer_options: str = basic("", "Settings of the step program", example="name=value,...")
    device: str = basic("auto", "Where to train: auto takes a GPU when there is one", example="auto|cpu|cuda")

    lr_base: float = rate(2.5e-5, "Learning rate after warm-up", above=0)
    lr_decay_style: str = rate("cosine_with_min_lr", "Schedule of the learning rate",
                               choices=["linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
                                        "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr",
                                        "cosine_warmup_with_min_lr", "lambda_linear", "openpi_cosine",
                                        "lerobot_cosine"])
    lr_warmup_iters: int = rate(2000, "Steps of linear warm-up", low=0)
    lr_decay_iters: int | None = rate(None, "Step at which decay ends; none is --train-iters", low=1)
    min_lr: float = rate(1e-6, "Floor of the decay, of each group", low=0)
    lr_group: str | None = rate(None, "Rates by module, submodules first: path, tower or pattern = rate[:floor]",
                                example="vision=1e-5,expert=1e-4")
    num_cycles: float = rate(1.0, "Cycles of cosine_with_restarts", above=0)
    polynomial_power: float = rate(1.0, "Power of polynomial", above=0)
    lr_end: float = rate(1e-7, "Last rate of polynomial", low=0)
    lambda_f_start: float = rate(0.0, "Factor of lambda_linear at the start of a cycle", low=0)
    lambda_f_max: float = rate(0.4, "Factor of lambda_linear after warm-up", low=0)
    lambda_f_min: float = rate(0.0, "Factor of lambda_linear at the end of a cycle", low=0)
    lambda_cycle_length: int | None = rate(10_000, "Steps of a cycle of lambda_linear; none is the whole decay", low=1)

    optimizer: str = optim("AdamW", "Optimiser", choices=["AdamW", "TorchFusedAdamW", "TEFusedAdamW", "ApexFusedAdamW",
                                                     "ForgeAdamW", "Adam", "SGD"])
    clip_grad: float = optim(1.0, "Largest gradient norm; 0 or less only measures it")
    weight_decay: float = optim(0.01, "Decoupled weight decay", low=0)
    weight_decay_grouping: str = optim("all", "Which parameters decay: all, or all but biases and norms",
                                       choices=["all", "bias_norm"])
    adam_beta1: float = optim(0.9, "Decay of Adam's first moment", low=0, below=1)
    adam_beta2: float = optim(0.95, "Decay of Adam's second moment", low=0, below=1)
    adam_eps: float = optim(1e-8, "Added to the root of Adam's second moment", above=0)
    sgd_momentum: float = optim(0.0, "Momentum of SGD", low=0, below=1)
    master_weights: bool = optim(True, "Keep fp32 masters of bf16 and fp16 weights")
    ema_decay: float | None = optim(None, "Average the weights with this decay; evaluation uses the average",
                                    low=0, below=1)
    freeze_modules: str = optim("", "What does not train: paths, towers or patterns", example="vision,language")

    loss_spike_threshold: float = guard(100.0, "Largest loss that is trained on; 0 takes any")
    check_for_nan_in_loss_and_grad: bool = guard(True, "Skip steps whose loss or gradient is not finite")
    stop_after_skipped: int = guard(10, "Stop after so many skipped steps in a row; 0 never does", low=0)
    deterministic_mode: bool = guard(False, "Use deterministic algorithms only")
    disable_tf32: bool = guard(False, "Compute fp32 matrix products in full precision")
    manual_gc: bool = guard(False, "Collect garbage when told, not whenever Python likes")
    manual_gc_interval: int = guard(0, "With --manual-gc, steps between collections; 0 is at the start only", low=0)
    set_seed_by_rank: bool = guard(False, "Give each rank its own seed for what draws from global generators")

    dataset_format: str = data("lerobot_datasets", "Kind of dataset",
                               choices=["lerobot_datasets", "hdf5_datasets", "dummy_datasets"])
    dataset_path: str | None = data(None, "Folder (or HDF5 file) of the dataset", example="PATH")
    split: str = data("train", "Split of the dataset, as its info.json names them", example="NAME")
    episodes: str | None = data(None, "Episodes to use; none is all of the split", example="0-9,12")
    num_samples: int = data(100, "Samples to make up with --dataset-format dummy_datasets", low=1)
    lerobotdataset_version: str = data("v3.0", "Version the dataset must have; unset, its own is read",
                                       choices=["v2.0", "v2.1", "v3.0"])
    dataset_strategy: str = data("default", "Whose way of building samples: default is the model's own",
                                 choices=["default", "fastwam", "lingbot_va", "groot_n1_7", "cosmos3_droid",
                                          "dreamzero"])
    video_backend: str = data("torchcodec", "Video decoder; unset, pyav where torchcodec cannot load",
                              choices=["torchcodec", "decord", "opencv", "pyav", "torchvision_av"])
    robot_type: str | None = data(None, "Embodiment, for families with several layouts; unset, the dataset's",
                                  example="NAME")
    num_workers: int = data(4, "Loader processes of one training process", low=0)
    dataloader_seed_workers: bool = data(False, "Also seed the global generators of loader processes")
    dataloader_multiprocessing_context: str | None = data(None, "How loader processes start; unset, chosen",
                                                          choices=["fork", "spawn", "forkserver"])
    sampler_shuffle: bool = data(True, "Visit the samples of each epoch in random order")
    batch_drop_last: bool = data(False, "Leave out an epoch's last, incomplete step; otherwise the next epoch fills it")
    distributed_sampler_mode: str = data("cyclic", "Which samples of a batch each rank gets",
                                         choices=["cyclic", "block", "balanced"])
    streaming: bool = data(False, "Read almost in order, for data larger than memory, with a shuffle buffer")
    allow_extreme_norm: bool = data(False, "Train even if normalised values are extreme")

    pretrained_checkpoint: str | None = save(None, "Weights to start from, ours or official",
                                             example="PATH")
    resume: bool = save(False, "Continue from the newest whole checkpoint of --output-dir")
    save_interval: int = save(10_000, "Steps between checkpoints; 0 saves none", low=0)
    save_format: str = save("safetensors", "Format of the weights", choices=["safetensors", "pt", "dcp"])
    save_training_state: bool = save(True, "Save what --resume needs beside the weights")
    async_save: bool = save(False, "Write checkpoints in the background, from a copy")
    save_total_limit: int | None = save(None, "Newest checkpoints to keep, besides the best; unset, all", low=1)
    save_rehearsal: bool = save(True, "Save, read back and compare a checkpoint before the first step")
    export: str | None = save(None, "Write the newest checkpoint (or --pretrained-checkpoint) in this form, then stop",
                              example="safetensors|pt|dcp|lerobot|openpi|...")
    export_dir: str | None = save(None, "Folder of the export; unset, export/FORMAT of --output-dir", example="DIR")
    export_dtype: str | None = save(None, "Precision of the export; unset, the checkpoint's",
                                    choices=["float32", "bfloat16", "float16"])
    export_average: bool = save(True, "Export the averaged weights, where the run kept some")
    new_modules: str = save("", "Parameters that --pretrained-checkpoint need not have: paths or patterns",
                            example="action_in,action_out")

    dtype: str = lower("bfloat16", "Precision of the computation", choices=["bfloat16", "float16", "float32"])
    compile: bool = lower(False, "Compile the repeated blocks")
    plan: bool = lower(False, "Print the plan of optimisations, then stop")
    with_passes: tuple[str, ...] = lower((), "Passes to turn on", name="with", example="PASS,...")
    without_passes: tuple[str, ...] = lower((), "Passes to turn off", name="without", example="PASS,...")
    remat: str = lower("none", "What the backward computes again instead of keeping it: parts of a block, or all of it",
                       choices=["none", "selective", "full"])
    activation_checkpoint_module_patterns: tuple[str, ...] = lower(
        (), "Modules computed again in the backward, instead of the blocks; * stays within a segment",
        example="layers.*.language,...")
    activation_checkpoint_skip_modules: tuple[str, ...] = lower(
        (), "Those of them that are kept after all", example="layers.0.language,...")
    buckets: int = lower(0, "With fixed shapes: round lengths up to a multiple of this; 0 is the model's own", low=0)
    fuel: int | None = lower(None, "Apply only the first N changes of the plan, to find a faulty one", low=0)
    device_kind: str | None = lower(None, "Device to plan for with --plan or --dry-run; unset, this one",
                                    example="cpu|cuda|h200")
    cuda_graph_impl: str = lower("none", "CUDA graphs: none or local; unless you set it, the plan decides",
                                 choices=["none", "local"])
    cuda_graph_scope: str = lower("full_iteration", "Captured: the whole step (graph_step), or each block's forward "
                                  "and backward (graph_blocks)", choices=["full_iteration", "per_microbatch"])
    cuda_graph_warmup_steps: int = lower(3, "Steps that run eagerly before a capture; DDP needs eleven", low=1)
    cuda_graph_pad_length: int | None = lower(None, "Round lengths up to multiples of this, as --buckets; 0 leaves it "
                                              "to the plan", low=0)
    cuda_graph_ddp_sync_in_graph: bool = lower(False, "With ddp: capture the reduction too; unless you set it, the "
                                               "scope decides")
    cuda_graph_grad_sync_bucket_mb: float = lower(200.0, "With ddp: size of a bucket in MB; unless you set it, DDP's",
                                                  above=0)
    cuda_graph_grad_sync_impl: str = lower("coalesced", "With ddp: gradients in buckets, or flat in a single one",
                                           choices=["coalesced", "flat"])
    cuda_graph_grad_sync_dtype: str = lower("fp32", "With ddp: precision in which gradients are sent",
                                            choices=["fp32", "bf16"])
    verify_compile: int = lower(0, "Compare N lowered steps with plain ones before training", low=0)

    use_lora: bool = lora(False, "Train low-rank adapters beside frozen weights")
    lora_r: int = lora(16, "Rank of the adapters", low=1)
    lora_alpha: float = lora(32.0, "Scale of the adapters: alpha / rank", above=0)
    lora_dropout: float = lora(0.0, "Dropout on the input of the adapters", low=0, below=1)
    lora_target_modules: str | None = lora(None, "What is adapted: paths, towers, patterns or last names; unset, every "
                                           "linear of the repeated blocks", example="q_proj,v_proj")
    lora_modules_to_save: str | None = lora(None, "Parameters that train whole and are kept with the adapter",
                                            example="action_in,action_out")
    lora_bias: str = lora("none", "Biases that train too", choices=["none", "all", "lora_only"])
    lora_init: str = lora("true", "First values: true (B zero), gaussian, false (B random)",
                          choices=["true", "false", "gaussian"])
    lora_adapter: str | None = lora(None, "Adapter to start from, ours or peft's", example="DIR")

    log_interval: int = log(1, "Steps between log lines", low=1)
    detail_log_interval: int = log(20, "Steps between timings of a step's stages; 0 never", low=0)
    timing_log_level: int = log(0, "1 prints the stage times as well", choices=[0, 1])
    loss_log_rank: tuple[int, ...] = log((-1,), "Ranks whose own loss is logged; -1 is the global mean only")
    wandb_project: str = log("loongforge", "Weights & Biases project", example="NAME")
    wandb_mode: str = log("disabled", "Weights & Biases mode", choices=["online", "offline", "disabled"])
    tensorboard_queue_size: int = log(1000, "Events that TensorBoard holds before it writes", low=1)
    tensorboard_dir: str | None = log(None, "Folder for TensorBoard, within --output-dir when relative",
                                       example="DIR")

    eval_episodes: str | None = held(None, "Episodes held out, to compare recorded with predicted actions",
                                     example="5,7-9|last:N")
    eval_interval: int = held(0, "Steps between evaluations; 0 is before and after training only", low=0)

    profile: str | None = trace(None, "Profile steps A to B with torch's profiler; short for the next four",
                                example="A:B")
    use_pytorch_profiler: bool = trace(False, "Profile a window of steps with torch's profiler")
    use_nsys_profiler: bool = trace(False, "Mark the window for Nsight Systems instead")
    profile_step_start: int = trace(10, "First step of the window", low=1)
    profile_step_end: int = trace(12, "Last step of the window", low=1)
    profile_ranks: tuple[int, ...] = trace((0,), "Processes that profile", low=0)
    profile_output_dir: str | None = trace(None, "Folder of traces; none is profiler/ of --output-dir",
                                          example="DIR")

    world: int | None = ranks(None, "With --plan: memory, traffic and time of each strategy on so many devices", low=2)
    nproc: int = ranks(1, "Ranks to start on this machine, as torchrun does; 1 starts none", low=1)
    max_restarts: int = ranks(0, "With --nproc, restarts after a failure; each resumes by itself", low=0)
    distributed_timeout_minutes: float = ranks(10.0, "How long a rank waits for the others", above=0)
    distributed_strategy: str = ranks("fsdp", "How several ranks share the work", choices=["ddp", "fsdp"])
    zero_optimizer: bool = ranks(False, "With ddp: shard the optimiser's state (ZeRO-1)")
    zero_parameters_as_bucket_view: bool = ranks(False, "With --zero-optimizer: weights live in the communication "
                                                 "buffers; they always do here")
    zero_master_param_dtype: str = ranks("none", "With --zero-optimizer: masters of low-precision weights; "
                                         "unset, --master-weights decides", choices=["none", "fp32"])
    hsdp_shard_size: int | None = ranks(None, "With fsdp: shard within groups of so many ranks, copy across",
                                        low=1)
    init_on_meta: bool = ranks(False, "Build the model without memory; each rank reads its own shards of the weights")
    ddp_find_unused_parameters: bool = ranks(True, "Look for parameters without gradient each step; unless you set it, "
                                             "none is looked for: models say which they have")
    ddp_static_graph: bool = ranks(False, "The same parameters get gradients in each step; unless you set it, on when "
                                   "gradients are not accumulated")
    ddp_gradient_as_bucket_view: bool = ranks(False, "Gradients live in DDP's buffers; unless you set it, on")
    ddp_bucket_cap_mb: int | None = ranks(None, "Size of DDP's buckets in MB; unset, torch's", low=1)
    ddp_bucket_cap_mb_list: tuple[int, ...] = ranks((), "Sizes of DDP's buckets in MB, in the order they get ready",
                                                    low=1)
    ddp_skip_all_reduce_unused_params: bool = ranks(False, "Send no bucket in which no parameter was used")
    ddp_batched_grad_copy: bool = ranks(False, "Copy a bucket's gradients at once")
    ddp_broadcast_buffers: bool = ranks(False, "Send rank 0's buffers to all before each forward")
    ddp_init_sync: bool = ranks(True, "Send rank 0's weights to all at the start")
    ddp_comm_hook: str | None = ranks(None, "How DDP sends gradients",
                                      choices=["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
    fsdp_wrap_modules: tuple[str, ...] = ranks((), "Module classes that are sharding units; none is the model's blocks",
                                               example="CLASS,...")
    fsdp_no_wrap_modules: tuple[str, ...] = ranks((), "Module classes that are no sharding units", example="CLASS,...")
    fsdp_min_num_params: int = ranks(1_000_000, "Least parameters of a block that is a unit", low=0)
    fsdp_leftover_min_num_params: int = ranks(1_000_000, "Least parameters of another layer that is a unit",
                                              low=0)
    fsdp_reshard_default: str | None = ranks(None, "Drop gathered weights after the forward",
                                              example="true|false|none|N")
    fsdp_reshard_root: str = ranks("false", "The same for what is in no unit", example="true|false|none|N")
    fsdp_reshard_module_overrides: str | None = ranks(None, "The same by module class", example="CLASS=true,...")
    fsdp_forward_prefetch_distance: int = ranks(0, "Units gathered ahead in the forward; 0 leaves it to torch", low=0)
    fsdp_backward_prefetch_distance: int = ranks(0, "Units gathered ahead in the backward; 0 leaves it to torch", low=0)
    fsdp_original_param_dtype: str | None = ranks(None, "Precision of the shards; unset, the plan's",
                                                  choices=["fp32", "bf16", "fp16"])
    fsdp_unsharded_param_dtype: str | None = ranks(None, "Precision of gathered weights; unset, the shards'",
                                                   choices=["fp32", "bf16", "fp16"])
    fsdp_reduce_dtype: str = ranks("fp32", "Precision in which gradients are summed", choices=["fp32", "bf16", "fp16"])
    fsdp_cast_forward_inputs: bool = ranks(True, "Cast a unit's inputs to the precision of its gathered weights")

    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False, metadata={"internal": True})
    """Names of the fields that something else than their default decides (no flag of its own)."""

    def was_set(self, name: str) -> bool:
        """Whether a person or a file decided `name`; what was not may be chosen by the run itself."""
        return name in self.given or getattr(self, name) != type(self).__dataclass_fields__[name].default

    def __post_init__(self) -> None:
        check_values(self)
        if self.profile is not None:
            profile_range(self.profile)
        if self.profile_step_end < self.profile_step_start:
            raise UserError(
                f"--profile-step-end is {self.profile_step_end}: it must not be before --profile-step-start "
                f"{self.profile_step_start}."
            )
        if self.use_nsys_profiler and (self.use_pytorch_profiler or self.profile is not None):
            raise UserError("--use-nsys-profiler and torch's profiler were both asked for: choose one.")
        if self.lora_adapter and not self.use_lora:
            raise UserError("--lora-adapter is given without --use-lora: add it, or leave the adapter out.")
# fmt: on


def profile_range(text: str) -> tuple[int, int]:
    """``A:B`` as two step numbers, 1 <= A <= B."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"--profile is '{text}': it must be two step numbers with 1 <= A <= B, like 10:12.")
    return int(first), int(last)
