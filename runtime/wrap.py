"""The lowered model in its wrapper: DDP, or FSDP2 for ``fsdp``, HSDP and ZeRO-1. The engines are torch's own.

    ddp             every rank holds everything; gradients are averaged bucket by bucket under the backward
    zero1           weights, gradients and optimiser are sharded between steps; gathered once for a step, gradients are
                    reduce-scattered (`ddp --zero-optimizer`): the traffic of an all-reduce, and it overlaps
    fsdp            the same, but a block's weights are dropped after its forward and gathered again for its backward
    hsdp            fsdp inside groups of `--hsdp-shard-size` ranks, copies across them

The units of sharding are the model's declared blocks (`EmbodiedModel.blocks`); what is left belongs to the root.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import register_pytree_node

from vlaforge.data.errors import UserError, unknown
from vlaforge.graphs.passes.precision import kept_fp32
from vlaforge.models.base import EmbodiedModel, Losses, LossTerm
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.cuda_graphs import grad_sync

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STRATEGIES = ("none", "ddp", "zero1", "fsdp", "hsdp")
HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def strategy_of(args: TrainingArgs, world: int) -> str:
    """Which of `STRATEGIES` the flags mean. UserError where they contradict each other or the number of ranks."""
    shard = args.hsdp_shard_size
    if args.zero_optimizer and args.distributed_strategy != "ddp":
        raise UserError("--zero-optimizer belongs to --distributed-strategy ddp; fsdp shards the optimiser anyway.")
    if shard is not None and args.distributed_strategy != "fsdp":
        raise UserError("--hsdp-shard-size belongs to --distributed-strategy fsdp.")
    if shard is not None and world > 1 and (world % shard or shard > world):
        raise UserError(f"--hsdp-shard-size is {shard}, which does not divide the {world} ranks.")
    if world == 1:
        return "none"
    if args.distributed_strategy == "ddp":
        return "zero1" if args.zero_optimizer else "ddp"
    return "hsdp" if shard not in (None, world) else "fsdp"


# ------------------------------------------------------------------------------------------------- ddp


def _flatten_losses(losses: Losses) -> tuple[list[Any], Any]:
    names = sorted(losses.terms)
    values = [value for name in names for value in (losses.terms[name].sum, losses.terms[name].count)]
    return values, (tuple((name, losses.terms[name].weight) for name in names), losses.details)


def _unflatten_losses(values: Any, context: Any) -> Losses:
    names, details = context
    values = list(values)
    terms = {name: LossTerm(values[2 * i], values[2 * i + 1], weight) for i, (name, weight) in enumerate(names)}
    return Losses(terms, details)


# DDP's static graph hangs its first reduction on the tensors of the output, which it finds through pytrees.
register_pytree_node(Losses, _flatten_losses, _unflatten_losses)


# torch 2.13 renamed the argument.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


def wrap_ddp(model: EmbodiedModel, args: TrainingArgs, device: torch.device) -> DistributedDataParallel:
    """DDP with a static graph and bucket views, unless the flags say otherwise.

    Parameters that no loss reads must not require a gradient (families see to that), so no rank searches for them.
    """
    accumulates = args.gradient_accumulation_steps > 1
    unused = args.was_set("ddp_find_unused_parameters") and args.ddp_find_unused_parameters
    static = args.ddp_static_graph
    if not args.was_set("ddp_static_graph"):
        # torch cannot delay the first reduction of a static graph over several backwards.
        static = not accumulates and not unused
    elif static and accumulates:
        raise UserError("--ddp-static-graph does not go with --gradient-accumulation-steps above 1.")
    bucket, hook = grad_sync(args)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()] if device.type == "cuda" else None,
        bucket_cap_mb=bucket,
        find_unused_parameters=unused,
        gradient_as_bucket_view=args.ddp_gradient_as_bucket_view or not args.was_set("ddp_gradient_as_bucket_view"),
        static_graph=static,
        **{_BUFFERS: args.ddp_broadcast_buffers},
        **_newer(args),
        init_sync=args.ddp_init_sync,
    )
    if hook is not None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, getattr(default_hooks, hook))
    return wrapped


def _newer(args: TrainingArgs) -> dict[str, Any]:
    """What was asked for of the arguments that not every torch's DDP has. UserError where this one lacks it."""
    asked = {
        "bucket_cap_mb_list": list(args.ddp_bucket_cap_mb_list),
        "skip_all_reduce_unused_params": args.ddp_skip_all_reduce_unused_params,
        "batched_grad_copy": args.ddp_batched_grad_copy,
    }
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    for name, value in asked.items():
        if value and name not in known:
            flag = f"--ddp-{name.replace('_', '-')}"
            raise UserError(f"{flag} needs a newer torch: DDP of {torch.__version__} has no such argument.")
    return {name: value for name, value in asked.items() if value}


# ------------------------------------------------------------------------------------------------- fsdp


def wrap_fsdp(model: EmbodiedModel, args: TrainingArgs, device: torch.device, strategy: str) -> EmbodiedModel:
    """FSDP2 on the model's units, in place; masters that the cast left move to the sharded parameters."""
    # A last layer hands its input on as it came; nothing of ours writes into it.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    masters = {name: p._master_fp32 for name, p in model.named_parameters() if hasattr(p, "_master_fp32")}
    _cast_originals(model, args)
    options: dict[str, Any] = {"mesh": mesh_of(args, device, strategy), "mp_policy": _precision(args)}
    overrides = reshard_overrides(args, model)
    islands = _islands(model, args)
    units = [unit for unit in units_of(model, args) if not any(unit is island for island in islands)]
    for island in islands:
        fully_shard(island, mesh=options["mesh"], reshard_after_forward=strategy != "zero1")
    for unit in units:
        kind = type(unit).__name__
        default = False if strategy == "zero1" else parse_reshard(args.fsdp_reshard_default)
        chosen = overrides.get(kind, default)
        fully_shard(unit, **options, **({} if chosen is None else {"reshard_after_forward": chosen}))
    root = False if strategy == "zero1" else parse_reshard(args.fsdp_reshard_root)
    fully_shard(model, **options, **({} if root is None else {"reshard_after_forward": root}))
    _prefetch(units, args)
    for name, parameter in model.named_parameters():
        if name in masters:
            parameter._master_fp32 = masters[name]
    return model


def _islands(model: EmbodiedModel, args: TrainingArgs) -> list[nn.Module]:
    """Modules that compute in fp32 when the rest is gathered in less: units of their own, because a unit is gathered in
    one precision."""
    if _gathered_dtype(args) in (None, torch.float32):
        return []
    kept = kept_fp32(model)
    return [m for name, m in model.named_modules() if name in kept and any(True for _ in m.parameters(recurse=False))]


def _gathered_dtype(args: TrainingArgs) -> torch.dtype | None:
    """What shards become when they are gathered: the flag, or the run's precision; None leaves them."""
    if args.fsdp_unsharded_param_dtype is not None:
        return DTYPES[args.fsdp_unsharded_param_dtype]
    return None if args.dtype == "float32" else getattr(torch, args.dtype)


def _cast_originals(model: nn.Module, args: TrainingArgs) -> None:
    """``--fsdp-original-param-dtype``: what is kept and sharded, whatever is gathered."""
    if args.fsdp_original_param_dtype is None:
        return
    dtype = DTYPES[args.fsdp_original_param_dtype]
    for parameter in model.parameters():
        exact = getattr(parameter, "_master_fp32", None)
        parameter.data = (parameter.data if exact is None else exact).to(dtype)
        if exact is not None and dtype == torch.float32:
            del parameter._master_fp32


def _precision(args: TrainingArgs) -> MixedPrecisionPolicy:
    # Without the flag the model casts for itself where it matters: tables and conditions stay in fp32.
    casts = args.fsdp_unsharded_param_dtype is not None and args.fsdp_cast_forward_inputs
    return MixedPrecisionPolicy(
        param_dtype=_gathered_dtype(args), reduce_dtype=DTYPES[args.fsdp_reduce_dtype], cast_forward_inputs=casts
    )


def mesh_of(args: TrainingArgs, device: torch.device, strategy: str) -> DeviceMesh:
    """One dimension of all ranks; for HSDP (copies, shards)."""
    world = torch.distributed.get_world_size()
    if strategy != "hsdp":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    shard = args.hsdp_shard_size
    return init_device_mesh(device.type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def units_of(model: EmbodiedModel, args: TrainingArgs) -> list[nn.Module]:
    """The modules that are sharded on their own, in order of use.

    ``--fsdp-wrap-modules`` names their classes exactly. Otherwise they are the declared blocks of at least
    ``--fsdp-min-num-params`` parameters, and, outside of these, linear layers and embeddings of at least
    ``--fsdp-leftover-min-num-params``. ``--fsdp-no-wrap-modules`` takes classes out.
    """
    classes = {type(module).__name__: module for module in model.modules()}
    for flag, names in (("wrap", args.fsdp_wrap_modules), ("no-wrap", args.fsdp_no_wrap_modules)):
        for name in names or ():
            if name not in classes:
                raise unknown(f"module class in --fsdp-{flag}-modules", name, classes)
    left_out = set(args.fsdp_no_wrap_modules or ())
    if args.fsdp_wrap_modules:
        chosen = [m for m in model.modules() if type(m).__name__ in args.fsdp_wrap_modules and m is not model]
        return [m for m in chosen if type(m).__name__ not in left_out]
    blocks = [module for group in model.blocks() for module in group.modules(model)]
    units = [
        block for block in blocks if _size(block) >= args.fsdp_min_num_params and type(block).__name__ not in left_out
    ]
    inside = {id(module) for unit in units for module in unit.modules()}
    leftovers = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear | nn.Embedding)
        and id(module) not in inside
        and type(module).__name__ not in left_out
        and 0 < args.fsdp_leftover_min_num_params <= _size(module)
    ]
    return units + leftovers


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def reshard_overrides(args: TrainingArgs, model: nn.Module) -> dict[str, bool | int | None]:
    """``Class=value,…`` of ``--fsdp-reshard-module-overrides``; the names must be classes of the model."""
    classes = {type(module).__name__ for module in model.modules()}
    found = {}
    for part in filter(None, (args.fsdp_reshard_module_overrides or "").split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in classes:
            raise unknown("module class in --fsdp-reshard-module-overrides", name.strip(), classes)
        found[name.strip()] = parse_reshard(value)
    return found


def parse_reshard(text: str | bool | int | None) -> bool | int | None:
    """``true``, ``false``, ``none`` or a number above 1 (ranks that a block's weights stay spread over)."""
    if text is None or isinstance(text, bool):
        return text
    word = str(text).strip().lower()
    if word in ("true", "t"):
        return True
    if word in ("false", "f"):
        return False
    if word in ("none", "null", ""):
        return None
    if word.isdigit() and int(word) > 1:
        return int(word)
    raise UserError(f"A reshard policy is '{text}': give true, false, none or a number above 1.")


def _prefetch(units: Sequence[nn.Module], args: TrainingArgs) -> None:
    """How many units ahead are gathered while one computes; 0 leaves it to torch (one in the backward)."""
    forward, backward = args.fsdp_forward_prefetch_distance, args.fsdp_backward_prefetch_distance
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
        if backward:
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - backward) : index])))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def keep_gathered(module: FSDPModule) -> Callable[[], None]:
    """Has `module` keep its weights behind its forward, so that code of one rank alone may call it once they are
    gathered; returns what restores its policy."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return lambda: None
    policy = group.post_forward_mesh_info
    group.post_forward_mesh_info = None

    def restore() -> None:
        group.post_forward_mesh_info = policy

    return restore
