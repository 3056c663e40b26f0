"""Everything that can be checked before a model is built; ``--dry-run`` prints it with the memory that will be needed.

Faults of the user end here, in one sentence, before a weight is read: checkpoints are looked at through their headers,
the model exists only as shapes (on the meta device), and one sample goes all the way to the batch contract.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vlaforge.data.collate import collate
from vlaforge.data.errors import UserError
from vlaforge.data.schema import sample_rng
from vlaforge.graphs import PlanOptions, make_plan
from vlaforge.graphs.cost import step_cost
from vlaforge.graphs.devices import GIB, device_kind
from vlaforge.models.convert import Account
from vlaforge.models.convert import detect as detect_layout
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.checkpoint.store import Checkpoints
from vlaforge.runtime.config import Resolved
from vlaforge.runtime.setup import Setup, build_setup
from vlaforge.runtime.wrap import strategy_of

Passed = Callable[[str, str], None]
"""Told of each check that held: its name, and what was found."""


def preflight(resolved: Resolved, passed: Passed = lambda name, what: None) -> Setup:
    """Runs all checks, cheapest first, and returns what they built. Raises UserError on the first fault."""
    args = resolved.args
    if args.device_kind is not None:
        device_kind(args.device_kind)
    check_output(Path(args.output_dir))
    passed("output folder", f"{Path(args.output_dir).resolve()} can be written")
    if args.resume:
        check_resume(args, passed)
    files = checkpoint_files(args.pretrained_checkpoint) if args.pretrained_checkpoint else []
    setup = build_setup(resolved, passed)
    model = meta_model(setup)
    make_plan(model, setup.contract, plan_options(args, setup.device))
    passed("model", f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters")
    if files:
        account = check_checkpoint(files, setup, model)
        passed("checkpoint", f"{args.pretrained_checkpoint}, {account.text().splitlines()[0]}")
    check_sample(setup)
    passed("first sample", "read, processed, and as the batch contract says")
    return setup


def check_output(folder: Path) -> None:
    """A file can be made in `folder`, which need not exist yet; nothing is left behind."""
    here = folder
    while not here.exists():
        here = here.parent
    if not here.is_dir():
        raise UserError(f"The output folder '{folder}' cannot be made: '{here}' is a file.")
    try:
        with tempfile.NamedTemporaryFile(dir=here, prefix=".vlaforge-"):
            pass
    except OSError as error:
        raise UserError(
            f"The output folder '{folder}' is not writable ({error.strerror}): choose another with --output-dir."
        ) from error


def check_resume(args: TrainingArgs, passed: Passed) -> None:
    """There is something to resume from."""
    folder = Path(args.output_dir) / "checkpoints"
    found = Checkpoints(folder).newest()
    if found is None:
        raise UserError(
            f"There is no whole checkpoint in '{folder}' to resume from: leave out --resume to start anew, or name the "
            f"run's folder with --output-dir."
        )
    passed("resume", f"from {found[1]}")


def meta_model(setup: Setup) -> torch.nn.Module:
    """The model as names and shapes."""
    with torch.device("meta"):
        return setup.resolved.family.model(setup.model_config)


def check_sample(setup: Setup) -> None:
    """The first training sample becomes a batch of the contract's names, shapes and dtypes."""
    sample = setup.dataset.get(0, setup.processing.needs())
    rng = sample_rng(setup.args.seed, 0, 0, "augment")
    try:
        collate([setup.processing.sample(sample, rng, True)], setup.contract)
    except ValueError as error:
        raise UserError(f"The dataset does not fit the model: {error}.") from error


# ------------------------------------------------------------------------------------------------- checkpoints


def checkpoint_files(given: str) -> list[Path]:
    """The safetensors files of a checkpoint; UserError when there is none."""
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"--pretrained-checkpoint '{given}' is not there: give a .safetensors file or its folder.")
    whole = path / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(f"--pretrained-checkpoint '{given}' holds no .safetensors file.")
    return files


def headers(files: list[Path]) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of the tensors in `files`, as tensors on the meta device; no weight is read."""
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 (it is no mapping)
                    found[key] = torch.empty(opened.get_slice(key).get_shape(), device="meta")
        except (SafetensorError, OSError, struct.error) as error:
            raise UserError(f"'{file}' is not a safetensors file that can be read: {error}.") from error
    return found


def check_checkpoint(files: list[Path], setup: Setup, model: torch.nn.Module) -> Account:
    """The checkpoint's keys and shapes fit the model, in our own names or in an official layout."""
    found = headers(files)
    shapes: Mapping[str, torch.Size] = {key: value.shape for key, value in model.state_dict().items()}
    if len(found.keys() & shapes.keys()) * 2 > len(shapes):
        return _check_own(found, shapes)
    layouts = setup.resolved.family.part("convert").LAYOUTS
    return detect_layout(layouts, found).load(found, shapes)[1]


def _check_own(found: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> Account:
    faults = {
        "missing": [key for key in shapes if key not in found],
        "unexpected": [key for key in found if key not in shapes],
        "of another shape": [
            f"{key} {tuple(found[key].shape)} instead of {tuple(shape)}"
            for key, shape in shapes.items()
            if key in found and found[key].shape != shape
        ],
    }
    said = [
        f"{len(keys)} {what} ({', '.join(keys[:12])}{', ...' if len(keys) > 12 else ''})"
        for what, keys in faults.items()
        if keys
    ]
    if said:
        raise UserError(f"The checkpoint does not fit the model: {'; '.join(said)}. Give one of this model and size.")
    return Account("vlaforge", loaded=list(shapes))


# ------------------------------------------------------------------------------------------------- memory


def plan_options(args: TrainingArgs, device: torch.device) -> PlanOptions:
    """What the plan and the memory estimate need to know of the flags."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    kind = args.device_kind or ("cpu" if device.type == "cpu" else "auto")
    return PlanOptions(
        dtype=args.dtype,
        device=kind,
        compile="on" if args.compile else "off",
        remat=args.remat,
        buckets=args.buckets,
        batch_size=args.per_device_batch_size,
        accumulate=args.gradient_accumulation_steps,
        with_=args.with_passes,
        without=args.without_passes,
        fuel=args.fuel,
        world=world,
        strategy=strategy_of(args, world),
    )


def memory_report(setup: Setup) -> str:
    """Memory of one step on one device: weights, gradients, optimiser, activations; and whether it fits."""
    options = plan_options(setup.args, setup.device)
    memory = step_cost(meta_model(setup), setup.contract, options)[0].memory
    lines = [f"memory of one device, batch {setup.args.per_device_batch_size}, {setup.args.dtype}:", memory.text()]
    available = options.device_kind.memory or _machine_memory()
    lines.append(f"{'available':<14}{available / GIB:9.2f} GiB")
    if memory.total > available:
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


def _machine_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
