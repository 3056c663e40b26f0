"""The ranks of a process group: sums, agreement, wrapping, and what happens when one of them fails or stalls.

Launched by torchrun, or by `forge-run --nproc N` (see `launch`). CPU ranks talk through gloo, GPU ranks through NCCL
with gloo beside it for what is on the host. Every rank tells the others through the store which step it is in, so
that a time-out names the ranks that did not come.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.heartbeat import Heartbeat
from vlaforge.runtime.optim.base import Leaf
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.wrap import keep_gathered, sharded_modules, strategy_of, wrap_ddp, wrap_fsdp


def launched() -> bool:
    """Whether this process is a rank of a job (torchrun's environment)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarts() -> int:
    """How often torchrun has started this job's ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def own_device(device: torch.device) -> torch.device:
    """This rank's device: of several GPUs the one of its local rank, which becomes the process's current one."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def end(code: int) -> None:
    """Ends this rank now, with all exit handlers run. Tearing down the interpreter while a backend's threads still
    exist aborts now and then, and would turn a finished job into a failed one."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class ProcessRanks(Ranks):
    """All ranks of the default process group. Use it in a ``with``: it ends the group.

    Raises UserError when the ranks cannot be joined in time.
    """

    def __init__(self, args: TrainingArgs, device: torch.device):
        self.args, self.device = args, device
        self.timeout = timedelta(minutes=args.distributed_timeout_minutes)
        _die_with_parent()
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=self.timeout))
            # The launcher keeps its store over restarts: without a prefix the dead ranks' addresses would be found.
            store = dist.PrefixStore(f"forge/{restarts()}", store)
            dist.init_process_group(backend, timeout=self.timeout, store=store, rank=rank, world_size=world)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"The ranks could not be joined: {error}") from error
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.strategy = strategy_of(args, self.world)
        self._shard_group: dist.ProcessGroup | None = None
        self._beat = Heartbeat(store, self.rank)

    def __enter__(self) -> ProcessRanks:
        self._beat.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._beat.stop()
        # After a fault the others may be in a collective that never ends: they are the launcher's.
        if kind is None and dist.is_initialized():
            dist.destroy_process_group()

    # ------------------------------------------------------------------------------------- inside a step

    @property
    def loss_factor(self) -> float:
        return float(self.world)

    def sum(self, values: Tensor) -> Tensor:
        total = values.detach().clone()
        dist.all_reduce(total)
        return total

    def square_norms(self, squares: Tensor, leaves: Sequence[Leaf]) -> Tensor:
        if self._shard_group is None:
            return squares
        # A parameter that is not sharded would be counted on every rank.
        sharded = torch.tensor([_is_sharded(leaf.param) for leaf in leaves])
        share = torch.where(sharded.to(squares.device), squares, squares / self._shard_group.size())
        dist.all_reduce(share, group=self._shard_group)
        return share

    def syncing(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        if isinstance(model, DistributedDataParallel):
            return nullcontext() if last else model.no_sync()
        return self._sharded_sync(model, last)

    @contextmanager
    def _sharded_sync(self, model: nn.Module, last: bool) -> Iterator[None]:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        yield

    # ------------------------------------------------------------------------------------- around a run

    def wrap(self, model: nn.Module, plan: Any) -> nn.Module:
        if self.strategy == "ddp":
            return wrap_ddp(model, self.args, self.device)
        wrapped = wrap_fsdp(model, self.args, self.device, self.strategy)
        mesh = next(p.device_mesh for p in wrapped.parameters() if isinstance(p, DTensor))
        self._shard_group = mesh.get_group("shard")
        return wrapped

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Whole weights on every rank inside the block, for what calls parts of the model (sampling)."""
        modules = sharded_modules(model)
        if modules:
            # Else the first part that is called would take itself for the root, before any step has run.
            model._get_fsdp_state()._lazy_init()
        policies = [keep_gathered(module) for module in modules]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module, restore in zip(modules, policies):
                restore()
                module.reshard()

    def tell(self, step: int) -> None:
        self._beat.step = step

    def collected(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        whole: dict[str, dict[str, Tensor]] = {}
        for group, tensors in groups.items():
            whole[group] = {}
            # One tensor at a time, and to the host at once: no device ever holds the whole model.
            for name, tensor in tensors.items():
                value = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
                if self.leads:
                    whole[group][name] = value
        return whole

    def notes(self, parts: Any) -> list[str]:
        mine = sum(tensor.numel() * tensor.element_size() for tensor in _held(parts.model.parameters()))
        moments = sum(leaf.weight.numel() * leaf.weight.element_size() for leaf in parts.optimizer.leaves)
        return [
            f"{self.strategy} over {self.world} ranks; rank {self.rank} holds {mine / 2**20:.1f} MiB of weights and "
            f"optimises {moments / 2**20:.1f} MiB"
        ]

    def any(self, flag: bool) -> bool:
        flags = torch.tensor(int(flag))
        self._waiting(lambda: dist.all_reduce(flags, op=dist.ReduceOp.MAX))
        return bool(flags)

    def agree(self, facts: dict[str, str]) -> None:
        digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in facts.items()}
        everybody = self.gather(digests)
        for name in facts:
            others = [rank for rank, given in enumerate(everybody) if given.get(name) != everybody[0].get(name)]
            if others:
                listed = ", ".join(map(str, others))
                raise UserError(
                    f"The ranks do not agree on the {name}: rank 0 and rank {listed} differ. Give every rank the same "
                    "code, configuration, data and checkpoint."
                )

    def barrier(self) -> None:
        self._waiting(lambda: dist.monitored_barrier(timeout=self.timeout) if self._gloo else dist.barrier())

    @property
    def _gloo(self) -> bool:
        return dist.get_backend() == "gloo"

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        self._waiting(lambda: dist.all_gather_object(values, value))
        return values

    def _waiting(self, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{self.absent()}") from error

    def failed_first(self) -> bool:
        """Tells the others that this rank fails; whether none had before. A rank says so while its connections still
        stand, so those that fail for want of it come after."""
        return self._beat.first_of("failed")

    def absent(self) -> str:
        """Who did not come: from what the ranks last told."""
        return self._beat.report(self.world)


def _held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What of `tensors` is in this rank's memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and any(isinstance(p, Shard) for p in parameter.placements)


def _die_with_parent() -> None:
    """A rank whose launcher was killed gets SIGTERM: it saves and leaves, rather than waiting for the others."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    try:
        set_death_signal = 1
        ctypes.CDLL("libc.so.6").prctl(set_death_signal, signal.SIGTERM)
    except OSError:
        return
