"""The optimiser's bookkeeping: groups, fp32 masters, state by canonical name, and a step without a host sync.

An optimiser is an *algorithm* (adamw, adam, sgd) and an *executor* that runs its arithmetic (plain torch,
torch's fused kernels, ours, Transformer Engine's, Apex's). All executors share one state layout, so a run
may be resumed with another one. A step takes the rate of each group, the factor on the gradients (clipping
and loss scaling) and the verdict of the guard as device tensors: a refused step changes nothing, and the
host never waits to know.

Masters: a bf16 or fp16 parameter is updated through an fp32 copy, taken from `param._master_fp32` when the
cast left one, and rounded back after each update. Sharded parameters (DTensor) are updated shard by shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vlaforge.data.errors import UserError

LOW_PRECISION = (torch.bfloat16, torch.float16)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_sharded(value: Tensor, like: Tensor) -> Tensor:
    """A local shard as a DTensor laid out as `like`, so that checkpoints see whole tensors."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@dataclass(frozen=True)
class Hyper:
    """Constants of the algorithms; `momentum` is SGD's."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0


@dataclass
class Group:
    """Parameters with one rate: `lr` and `floor` are absolute, `params` by canonical name."""

    name: str
    lr: float
    floor: float
    weight_decay: float
    params: dict[str, nn.Parameter]


@dataclass
class Leaf:
    """One parameter as the optimiser sees it; `state` holds fp32 (or the weight's dtype) tensors of its
    shard."""

    name: str
    group: int
    param: nn.Parameter
    master: Tensor | None
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def weight(self) -> Tensor:
        """What the update is applied to."""
        return self.master if self.master is not None else local(self.param.data)

    @property
    def grad(self) -> Tensor | None:
        return None if self.param.grad is None else local(self.param.grad)


@dataclass
class Bucket:
    """Leaves of one group that have had the same number of updates, with their tensors side by side.

    `grads` may be of lower precision than `weights`. `scale` (fp32) multiplies the gradients, `ok` (bool)
    says whether to update at all, `lr` is float64, `step` (fp32) counts updates including this one: all
    0-dim tensors.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    params: list[Tensor]
    ema: list[Tensor] | None
    ema_decay: float
    lr: Tensor
    weight_decay: float
    scale: Tensor
    ok: Tensor
    step: Tensor
    hyper: Hyper


class Executor(Protocol):
    """Runs one bucket's update in place. `fuses` names what it does besides: "master" rounding, "ema"."""

    fuses: frozenset[str]

    def __call__(self, bucket: Bucket) -> None: ...


class Ema(Protocol):
    """What the optimiser needs of an average of the weights (`runtime.ema.Ema`)."""

    decay: float

    def shadow(self, leaf: Leaf) -> Tensor: ...

    def update(self, leaves: Sequence[Leaf], ok: Tensor) -> None: ...


def average(shadows: list[Tensor], weights: Sequence[Tensor], decay: float, ok: Tensor) -> None:
    """shadow ← shadow + (1 - decay)(weight - shadow) in fp32, or nothing when `ok` is False."""
    share = torch.where(ok, torch.full_like(ok, 1.0 - decay, dtype=torch.float32), 0.0)
    # one 0-dim weight a tensor: as a single scalar it would be read by the host
    torch._foreach_lerp_(shadows, [weight.to(torch.float32) for weight in weights], [share] * len(shadows))


@dataclass
class Cohort:
    """Leaves of one group and dtype with the same history of updates, hence one step count between them."""

    leaves: list[Leaf]
    step: Tensor


class Optimizer:
    """An algorithm's state over parameter groups, stepped by an executor.

    Args:
        groups: disjoint groups; parameters that do not require a gradient are left out.
        keys: names of the algorithm's state tensors (``exp_avg``, ``exp_avg_sq``, ``momentum``).
        executor: runs the update.
        master_weights: keep fp32 masters of bf16 and fp16 parameters.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        keys: Sequence[str],
        executor: Executor,
        hyper: Hyper | None = None,
        master_weights: bool = True,
    ):
        self.groups = list(groups)
        self.keys = tuple(keys)
        self.executor = executor
        self.hyper = hyper or Hyper()
        self.ema: Ema | None = None
        self.leaves = [
            Leaf(name, number, param, _take_master(param, master_weights))
            for number, group in enumerate(self.groups)
            for name, param in group.params.items()
            if param.requires_grad
        ]
        if not self.leaves:
            raise UserError("Nothing to train: every parameter is frozen.")
        self.device = local(self.leaves[0].param).device
        self._cohorts = [Cohort(leaves, self._count(0.0)) for leaves in _by_kind(self.leaves)]

    def _count(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float32, device=self.device)

    # -------------------------------------------------------------------------------------------- stepping

    def zero_grad(self) -> None:
        """Drops the gradients: the next backward writes new ones rather than adding to zeros."""
        for leaf in self.leaves:
            leaf.param.grad = None

    def active(self) -> list[Leaf]:
        """Leaves that have a gradient."""
        return [leaf for leaf in self.leaves if leaf.param.grad is not None]

    def square_sums(self, leaves: Sequence[Leaf]) -> Tensor:
        """Σ g² of each leaf's gradient (of this rank's part of it): fp32 [n]."""
        grads = [leaf.grad for leaf in leaves]
        if hasattr(self.executor, "square_sums"):
            return self.executor.square_sums(grads)
        return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square()

    @torch.no_grad()
    def step(self, lr: Tensor, scale: Tensor, ok: Tensor) -> None:
        """Updates every parameter that has a gradient.

        Args:
            lr: rate of each group, [G].
            scale: 0-dim factor on the gradients.
            ok: 0-dim bool; False leaves parameters, state, average and counts as they are.
        """
        rates = lr.to(torch.float64).unbind()
        self._split_cohorts()
        for cohort in self._cohorts:
            if cohort.leaves[0].param.grad is None:
                continue
            cohort.step.add_(ok)
            bucket = self._bucket(cohort, rates, scale, ok)
            self.executor(bucket)
            if "master" not in self.executor.fuses and cohort.leaves[0].master is not None:
                torch._foreach_copy_(bucket.params, bucket.weights)
        if self.ema is not None and "ema" not in self.executor.fuses:
            self.ema.update(self.leaves, ok)

    def _bucket(self, cohort: Cohort, rates: Sequence[Tensor], scale: Tensor, ok: Tensor) -> Bucket:
        leaves = cohort.leaves
        for leaf in leaves:
            for key in self.keys:
                if key not in leaf.state:
                    leaf.state[key] = torch.zeros_like(leaf.weight, memory_format=torch.preserve_format)
        group = self.groups[leaves[0].group]
        return Bucket(
            weights=[leaf.weight for leaf in leaves],
            grads=[leaf.grad for leaf in leaves],
            state={key: [leaf.state[key] for leaf in leaves] for key in self.keys},
            params=[local(leaf.param.data) for leaf in leaves],
            ema=[self.ema.shadow(leaf) for leaf in leaves] if self.ema is not None else None,
            ema_decay=self.ema.decay if self.ema is not None else 0.0,
            lr=rates[leaves[0].group],
            weight_decay=group.weight_decay,
            scale=scale,
            ok=ok,
            step=cohort.step,
            hyper=self.hyper,
        )

    def _split_cohorts(self) -> None:
        """Parts leaves with a gradient from those without, which from now on count their updates apart."""
        parted = []
        for cohort in self._cohorts:
            with_grad = [leaf for leaf in cohort.leaves if leaf.param.grad is not None]
            if 0 < len(with_grad) < len(cohort.leaves):
                without = [leaf for leaf in cohort.leaves if leaf.param.grad is None]
                parted += [Cohort(with_grad, cohort.step), Cohort(without, cohort.step.clone())]
            else:
                parted.append(cohort)
        self._cohorts = parted

    def fuse(self) -> None:
        """Goes over to this package's fused AdamW, with the same state; other algorithms stay as they are."""
        from vlaforge.runtime.optim.forge import ForgeAdam

        if getattr(self.executor, "decoupled", False):
            self.executor = ForgeAdam()

    # ------------------------------------------------------------------------------------------------ state

    def state_tensors(self) -> dict[str, Tensor]:
        """``<key>.<parameter>`` → tensor, with ``master.<parameter>`` and 0-dim ``step.<parameter>``.

        Parameters that were never updated have no entry but their master.
        """
        steps = {id(leaf): cohort.step for cohort in self._cohorts for leaf in cohort.leaves}
        tensors = {}
        for leaf in self.leaves:
            for key, value in leaf.state.items():
                tensors[f"{key}.{leaf.name}"] = as_sharded(value, leaf.param.data)
            if leaf.state:
                tensors[f"step.{leaf.name}"] = steps[id(leaf)]
            if leaf.master is not None:
                tensors[f"master.{leaf.name}"] = as_sharded(leaf.master, leaf.param.data)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `state_tensors` gave, whatever the sharding. UserError lists what is missing or left
        over.

        Masters may be absent when the weights that were just loaded are exact (an fp32 checkpoint).
        """
        left = set(tensors)
        counts: dict[int, float] = {}
        for leaf in self.leaves:
            wanted = [f"{key}.{leaf.name}" for key in (*self.keys, "step")]
            missing = [name for name in wanted if name not in left]
            if 0 < len(missing) < len(wanted):
                raise UserError(f"The optimiser state lacks {', '.join(missing)}.")
            if not missing:
                counts[id(leaf)] = float(tensors[f"step.{leaf.name}"])
                for key in self.keys:
                    value = for_leaf(tensors[f"{key}.{leaf.name}"], leaf)
                    leaf.state[key] = torch.empty_like(leaf.weight).copy_(value)
            if leaf.master is not None:
                saved = tensors.get(f"master.{leaf.name}")
                leaf.master.copy_(local(leaf.param.data) if saved is None else for_leaf(saved, leaf))
            left -= {f"{key}.{leaf.name}" for key in (*self.keys, "step", "master")}
        if left:
            names = sorted({entry.partition(".")[2] for entry in left})
            raise UserError(
                f"The optimiser state is also of {len(names)} parameters that do not train here "
                f"({', '.join(names[:5])}): give the settings that it was saved with (--freeze-modules and the "
                "model's), or start a new run from the weights with --pretrained-checkpoint."
            )
        self._regroup(counts)

    def _regroup(self, counts: Mapping[int, float]) -> None:
        cohorts: dict[tuple[Any, ...], list[Leaf]] = {}
        for leaves in _by_kind(self.leaves):
            for leaf in leaves:
                key = (leaf.group, leaf.weight.dtype, leaf.master is None, counts.get(id(leaf), 0.0))
                cohorts.setdefault(key, []).append(leaf)
        self._cohorts = [Cohort(leaves, self._count(key[-1])) for key, leaves in cohorts.items()]

    def sync_masters(self) -> None:
        """Sets masters to the present parameters: after weights were loaded behind the optimiser's back."""
        for leaf in self.leaves:
            if leaf.master is not None:
                leaf.master.copy_(local(leaf.param.data))


def _take_master(param: nn.Parameter, wanted: bool) -> Tensor | None:
    """The fp32 copy of a low-precision parameter: the exact values that the cast kept, if it did."""
    kept = param.__dict__.pop("_master_fp32", None)
    if not wanted or param.dtype not in LOW_PRECISION:
        return None
    if kept is None:
        return local(param.data).to(torch.float32)
    kept = local(kept) if isinstance(kept, DTensor) or not isinstance(param, DTensor) else _shard(kept, param)
    return kept.to(device=local(param.data).device, dtype=torch.float32)


def _shard(value: Tensor, like: DTensor) -> Tensor:
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements).to_local()


def for_leaf(value: Tensor, leaf: Leaf) -> Tensor:
    """`value` (whole, or sharded as the parameter) as this rank's part of it."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(leaf.param.data, DTensor):
        return _shard(value, leaf.param.data)
    return value


def _by_kind(leaves: Sequence[Leaf]) -> list[list[Leaf]]:
    kinds: dict[tuple[Any, ...], list[Leaf]] = {}
    for leaf in leaves:
        kinds.setdefault((leaf.group, leaf.weight.dtype, leaf.master is None), []).append(leaf)
    return list(kinds.values())
