"""``--cuda-graph-…``: LoongForge's flags for CUDA graphs, as passes of the plan and options of DDP.

    full_iteration      `graph_step`: forward, backward, reduction and update in one graph
    per_microbatch      `graph_blocks`: each block's forward and backward; reduction and update stay outside

Whoever sets none of them gets what the plan finds best. On a CPU the plan says why a graph was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs

WHOLE, BLOCKS = "graph_step", "graph_blocks"
ONE_BUCKET_MB = 1 << 20
"""A bucket that holds the gradients of any model."""


def graph_options(args: TrainingArgs) -> dict[str, Any]:
    """What the flags make of `PlanOptions`: ``with_``, ``without``, ``buckets`` and ``graph_warmup``. UserError where
    they contradict --with, --without or --buckets."""
    options = {"with_": args.with_passes, "without": args.without_passes, "buckets": args.buckets}
    if not args.was_set("cuda_graph_impl"):
        return options
    if args.cuda_graph_impl == "none":
        on, off = (), (WHOLE, BLOCKS)
    else:
        whole = _whole(args)
        on, off = ((WHOLE,), ()) if whole else ((BLOCKS,), (WHOLE,))
        options |= {"buckets": _buckets(args), "graph_warmup": args.cuda_graph_warmup_steps}
    _agree(args, off, "with", args.with_passes)
    _agree(args, on, "without", args.without_passes)
    return options | {
        "with_": tuple(dict.fromkeys((*args.with_passes, *on))),
        "without": tuple(dict.fromkeys((*args.without_passes, *off))),
    }


def _agree(args: TrainingArgs, passes: Sequence[str], flag: str, given: Sequence[str]) -> None:
    for name in passes:
        if name in given:
            raise UserError(f"--cuda-graph-impl {args.cuda_graph_impl} contradicts --{flag} {name}: leave out one.")


def _whole(args: TrainingArgs) -> bool:
    """Whether the whole step is captured. DDP's reduction is part of it, unless it was told to stay outside."""
    if args.distributed_strategy == "ddp" and args.was_set("cuda_graph_ddp_sync_in_graph"):
        return args.cuda_graph_ddp_sync_in_graph
    return args.cuda_graph_scope == "full_iteration"


def _buckets(args: TrainingArgs) -> int:
    length = args.cuda_graph_pad_length or 0
    if length and args.buckets and args.buckets != length:
        raise UserError(
            f"--cuda-graph-pad-length is {length} and --buckets {args.buckets}: both round lengths up, so give one."
        )
    return length or args.buckets


def grad_sync(args: TrainingArgs) -> tuple[int | None, str | None]:
    """(MB of a DDP bucket, communication hook), from DDP's own flags or, with graphs, from theirs."""
    bucket, hook = args.ddp_bucket_cap_mb, args.ddp_comm_hook
    if args.cuda_graph_impl == "none":
        return bucket, hook
    if args.cuda_graph_grad_sync_impl == "flat":
        bucket = bucket or ONE_BUCKET_MB
    elif args.was_set("cuda_graph_grad_sync_bucket_mb"):
        bucket = bucket or max(1, round(args.cuda_graph_grad_sync_bucket_mb))
    if args.cuda_graph_grad_sync_dtype == "bf16":
        hook = hook or "bf16_compress_hook"
    return bucket, hook
