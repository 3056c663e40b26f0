"""Everything that can be checked before a model is built; ``--dry-run`` prints it with the memory that will be needed.

Faults of the user end here, in one sentence, before a weight is read: checkpoints are looked at through their headers,
the model exists only as shapes (on the meta device), and one sample goes all the way to the batch contract.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from vlaforge.data.collate import collate
from vlaforge.data.dataset import DatasetInfo
from vlaforge.data.errors import UserError
from vlaforge.data.schema import IMAGES, Contract, Sample, sample_rng
from vlaforge.graphs import PlanOptions, make_plan
from vlaforge.graphs.cost import meta_inputs
from vlaforge.graphs.devices import device_kind
from vlaforge.runtime.adapter import adapt
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.checkpoint.resumed import check_resumed, check_resumed_optimizer, check_resumed_weights
from vlaforge.runtime.checkpoint.store import Checkpoints
from vlaforge.runtime.checkpoint.weights import check_pretrained, find_weights
from vlaforge.runtime.config import Resolved
from vlaforge.runtime.cuda_graphs import graph_options
from vlaforge.runtime.launch import check_processes, world_size
from vlaforge.runtime.memory import check_memory
from vlaforge.runtime.optim import Group, executor, fading
from vlaforge.runtime.params import build_groups_of, split_names
from vlaforge.runtime.programs import options, program
from vlaforge.runtime.schedules import build_schedule
from vlaforge.runtime.setup import Setup, build_setup
from vlaforge.runtime.valueless import NeedsValues, valueless
from vlaforge.runtime.wrap import strategy_of

Passed = Callable[[str, str], None]
"""Told of each check that held: its name, and what was found."""


def preflight(resolved: Resolved, passed: Passed = lambda name, what: None) -> Setup:
    """Runs all checks, cheapest first, and returns what they built. Raises UserError on the first fault."""
    args = resolved.args
    if args.device_kind is not None:
        device_kind(args.device_kind)
    check_processes("--num-workers", args.num_workers)
    check_output(Path(args.output_dir))
    check_apart(args)
    if args.tensorboard_dir is not None:
        check_output(Path(args.output_dir) / args.tensorboard_dir, "--tensorboard-dir")
    if args.profile_output_dir is not None:
        check_output(Path(args.profile_output_dir), "--profile-output-dir")
    passed("output folder", f"{Path(args.output_dir).resolve()} can be written")
    found = check_resume(args, passed) if args.resume else None
    if args.pretrained_checkpoint is not None:
        find_weights(args.pretrained_checkpoint)
    executor(args.optimizer)
    options(args, program(args.trainer_type).settings)
    setup = build_setup(resolved, passed)
    if found is not None:
        setup.notes += check_resumed(setup, found)
    model = meta_model(setup)
    make_plan(model, setup.contract, plan_options(args, setup.device))
    passed("model", f"{sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters")
    check_forward(model, setup.contract)
    if found is not None:
        check_resumed_weights(setup, model, found)
    if args.pretrained_checkpoint is not None:
        new = split_names(args.new_modules)
        account = check_pretrained(model, setup.resolved.family, args.pretrained_checkpoint, new)
        passed("checkpoint", f"{args.pretrained_checkpoint}, {account.text().splitlines()[0]}")
    groups = check_trained(args, model, found)
    if found is not None:
        check_resumed_optimizer(setup, model, found)
    if not args.dry_run:
        check_memory(args, model, setup.contract, run_options(setup, model, groups))
    setup.notes += check_sample(setup)
    passed("first sample", "read, processed, and as the batch contract says")
    return setup


def check_output(folder: Path, flag: str = "--output-dir") -> None:
    """A file can be made in `folder`, which need not exist yet; nothing is left behind."""
    here = folder
    while not here.exists():
        here = here.parent
    if not here.is_dir():
        raise UserError(f"The output folder '{folder}' cannot be made: '{here}' is a file; choose another {flag}.")
    try:
        with tempfile.NamedTemporaryFile(dir=here, prefix=".vlaforge-"):
            pass
    except OSError as error:
        raise UserError(
            f"The output folder '{folder}' is not writable ({error.strerror}): choose another with {flag}."
        ) from error


def check_apart(args: TrainingArgs) -> None:
    """Nothing is ever written into a dataset."""
    if args.dataset_path is None or not Path(args.dataset_path).expanduser().is_dir():
        return
    dataset, output = Path(args.dataset_path).expanduser().resolve(), Path(args.output_dir).resolve()
    if dataset in (output, *output.parents):
        raise UserError(
            f"The output folder '{args.output_dir}' lies inside the dataset '{args.dataset_path}', which is only read: "
            "choose another --output-dir."
        )


def check_resume(args: TrainingArgs, passed: Passed = lambda name, what: None) -> Path:
    """The checkpoint to resume from."""
    folder = Path(args.output_dir) / "checkpoints"
    found = Checkpoints(folder).newest()
    if found is None:
        raise UserError(
            f"There is no whole checkpoint in '{folder}' to resume from: leave out --resume to start anew, or name the "
            f"run's folder with --output-dir."
        )
    passed("resume", f"from {found[1]}")
    return found[1]


def meta_model(setup: Setup) -> torch.nn.Module:
    """The model as names and shapes."""
    with settings_fit("be built"), torch.device("meta"):
        return setup.resolved.family.model(setup.model_config)


def check_forward(model: torch.nn.Module, contract: Contract) -> None:
    """One sample goes through `model` (on the meta device), so that its sizes fit one another; as far as that can be
    known without values."""
    batch, draw = meta_inputs(contract, 1)
    with settings_fit("compute a loss"), suppress(NeedsValues), valueless(), torch.no_grad():
        model.frozen_networks("meta")  # made beforehand: they are no part of the forward
        model(batch, draw)


@contextmanager
def settings_fit(what: str) -> Iterator[None]:
    """Turns what torch says of sizes that do not go together into a sentence."""
    try:
        yield
    except (ArithmeticError, AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"A model with these settings of model.* cannot {what}: {why}.") from error


def check_trained(args: TrainingArgs, model: torch.nn.Module, found: Path | None) -> list[Group]:
    """What is frozen, adapted and given a rate of its own is named rightly, and something is left to train."""
    if args.use_lora:
        adapt(model, args, found)
    groups = build_groups_of(args, model)
    if not groups:
        raise UserError("Nothing to train: every parameter is frozen, so free some in --freeze-modules.")
    return groups


def check_sample(setup: Setup) -> list[str]:
    """The first training sample becomes a batch of the contract's names, shapes and dtypes; returns what its processing
    warns of."""
    sample = setup.dataset.get(0, setup.processing.needs())
    check_frames(setup.dataset.info, sample)
    rng = sample_rng(setup.args.seed, 0, 0, "augment")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            collate([setup.processing.sample(sample, rng, True)], setup.contract)
        except ValueError as error:
            raise UserError(f"The dataset does not fit the model: {error}.") from error
    return [str(one.message) for one in caught if one.category is UserWarning]


def check_frames(info: DatasetInfo, sample: Sample) -> None:
    """The frames have the size that the metadata gives, by which views are resized and batched."""
    for name, camera in info.cameras.items():
        frame = sample.get(IMAGES + name)
        if frame is not None and tuple(frame.shape[-3:-1]) != (camera.height, camera.width):
            height, width = frame.shape[-3:-1]
            raise UserError(
                f"{info.path}: frames of camera '{name}' are {height} x {width}, but its metadata says "
                f"{camera.height} x {camera.width}: the metadata is not this data's; run `forge-data check` on it."
            )


# ------------------------------------------------------------------------------------------------- memory


def on_paper(setup: Setup) -> tuple[torch.nn.Module, PlanOptions]:
    """The model as it will train (adapted, partly frozen) as names and shapes, and what its plan depends on."""
    found = check_resume(setup.args) if setup.args.resume else None
    model = meta_model(setup)
    groups = check_trained(setup.args, model, found)
    return model, run_options(setup, model, groups)


def plan_options(args: TrainingArgs, device: torch.device) -> PlanOptions:
    """What the plan needs to know of the flags."""
    world = world_size()
    kind = args.device_kind or ("cpu" if device.type == "cpu" else "auto")
    return PlanOptions(
        dtype=args.dtype,
        device=kind,
        compile="on" if args.compile else "off",
        remat=args.remat,
        remat_modules=args.activation_checkpoint_module_patterns,
        remat_skip=args.activation_checkpoint_skip_modules,
        batch_size=args.per_device_batch_size,
        accumulate=args.gradient_accumulation_steps,
        fuel=args.fuel,
        world=world,
        strategy=strategy_of(args, world),
        **graph_options(args),
    )


def run_options(setup: Setup, model: torch.nn.Module, groups: Sequence[Group]) -> PlanOptions:
    """What the plan and the memory estimate need to know of a run: the flags, what of `model` trains, the data."""
    args = setup.args
    return replace(
        plan_options(args, setup.device),
        frozen=frozenset(name for name, param in model.named_parameters() if not param.requires_grad),
        groups={name: group.name for group in groups for name in group.params},
        fp32_masters=args.master_weights,
        adapters=args.use_lora,
        fading=fading(args.optimizer, groups, build_schedule(args).highest),
        embodiments=program(args.trainer_type).embodiments(setup),
    )
