"""Whether a run fits into one device's memory: what surely does not is refused, the rest is estimated and advised."""

from __future__ import annotations

import math
import os

from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Contract
from vlaforge.graphs import PlanOptions
from vlaforge.graphs.cost import lowered, step_cost, weights_memory
from vlaforge.graphs.devices import GIB
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.setup import Setup


def check_memory(args: TrainingArgs, model: nn.Module, contract: Contract, options: PlanOptions) -> None:
    """Raises UserError when what training holds at all times, before any activation, is more than one device has.

    Args:
        model: its parameters in fp32, on any device; what is frozen is frozen. The plan for `options` is not made yet.
        contract: of a batch, which stands beside the weights.
    """
    memory = weights_memory(lowered(model, contract, options)[0], options)
    shared = options.world if options.strategy == "zero1" else 1
    updated = memory.masters + (0 if args.optimizer == "SGD" else memory.optimizer)
    held = memory.weights + memory.gradients + updated // shared
    fields = contract.fields.values()
    batch = args.per_device_batch_size * sum(math.prod(field.shape) * field.dtype.itemsize for field in fields)
    there = available(options)
    if held + batch > there:
        raise UserError(
            f"The run cannot fit: weights, gradients and optimiser take {held / GIB:.1f} GiB and a batch "
            f"{batch / GIB:.1f} GiB, but {options.device_kind.label} has {there / GIB:.1f} GiB. Choose a smaller model "
            "or batch, freeze or adapt more of it (--freeze-modules, --use-lora), or shard it over several devices "
            "(--nproc, --distributed-strategy fsdp)."
        )


def available(options: PlanOptions) -> float:
    """Bytes of the device that a run is planned for; of the CPU, the machine's."""
    return options.device_kind.memory or float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def memory_report(setup: Setup, model: nn.Module, options: PlanOptions) -> str:
    """Memory of one step on one device: weights, gradients, optimiser, activations; and whether it fits."""
    memory = step_cost(model, setup.contract, options)[0].memory
    lines = [f"memory of one device, batch {setup.args.per_device_batch_size}, {setup.args.dtype}:", memory.text()]
    there = available(options)
    lines.append(f"{'available':<14}{there / GIB:9.2f} GiB")
    if memory.total > there:
        lines.append(advice(setup.args, memory.activations > memory.total / 2))
    return "\n".join(lines)


def advice(args: TrainingArgs, activations: bool) -> str:
    """What to change when a run does not fit."""
    ways = []
    if activations and args.remat != "full":
        ways.append(f"recompute with --remat {'selective' if args.remat == 'none' else 'full'}")
    if activations and args.per_device_batch_size > 1:
        ways.append(
            f"halve --per-device-batch-size to {args.per_device_batch_size // 2} and double "
            f"--gradient-accumulation-steps to {2 * args.gradient_accumulation_steps}, which trains the same"
        )
    if not activations:
        ways.append("shard it over several devices (--distributed-strategy fsdp), or train LoRA adapters (--use-lora)")
    return f"This does not fit: {', or '.join(ways) or 'the batch is as small as it can be'}."
