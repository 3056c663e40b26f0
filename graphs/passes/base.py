"""What a pass is: a named change of a model (or of its step) that says where it applies, and why not.

    decide(model, context)   on or not, with the reason a person reads
    sites(model, context)    every place it would change, with what it claims there; nothing is changed yet
    apply(model, sites, ...) changes exactly those places

One file in this folder, one `Pass` subclass in it: `graphs.plan` finds it. Passes know blocks (`models.blocks`) and the
model contract (`blocks()`, `towers()`, `contract()`), never a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import nn

from vlaforge.data.schema import Contract
from vlaforge.graphs.options import PlanOptions

Stage = Literal["module", "step"]
Numerics = Literal["exact", "reorder", "approx"]


@dataclass(frozen=True)
class Decision:
    """Whether a pass is on, and the sentence that says what it does or why it does nothing; `numerics` where it is
    another class than the pass's own here."""

    on: bool
    reason: str
    numerics: Numerics | None = None


@dataclass(frozen=True)
class Site:
    """One place that a pass changes.

    Args:
        path: attribute path from the model's root, or a name of the step's part ("step", "loader").
        what: what is changed there, as the plan counts it ("rms_norm", "qkv").
        claims: resources nobody else may take, as ``aspect:path`` (see `claim`); two passes with the same claim
            conflict.
    """

    path: str
    what: str
    claims: tuple[str, ...] = ()


def claim(aspect: str, path: str) -> str:
    """The claim on one aspect of a place. Aspects in use: ``forward`` (what calling the module runs), ``call`` (how it
    is called: compiled, captured), ``recompute``, ``storage`` (where a parameter lives), ``step``, ``loader``."""
    return f"{aspect}:{path}"


@dataclass
class Context:
    """What decisions may look at, besides the model.

    `on` holds the passes decided on so far, in the plan's order: a pass may lean on an earlier one (`graph_step` needs
    repeating shapes, so it asks for `static_shapes`).
    """

    contract: Contract
    options: PlanOptions
    on: list[str] = field(default_factory=list)

    @property
    def asked(self) -> frozenset[str]:
        return frozenset(self.options.with_)


@dataclass
class StepParts:
    """What the runtime hands over after wrapping; passes of the step stage replace parts of it.

    Args:
        model: the wrapped model.
        step: ``step(minibatches) -> dict of scalar tensors``: forward, backward and update of one optimiser step,
            without a host sync.
        loader: an iterable of `Minibatch` on the host.
        optimizer: the optimiser, for passes that change how it updates; None when there is none (a benchmark).
        device: where the step runs.
    """

    model: nn.Module
    step: Callable[..., Any]
    loader: Iterable[Any]
    optimizer: Any
    device: Any


class Pass(ABC):
    """Base of all passes. Subclasses set the class variables and have no state of their own.

    `order` places the pass in the plan. `default` passes are on wherever they apply; the others only when asked for
    by name (or by an option that means them), and say so.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage] = "module"
    numerics: ClassVar[Numerics]
    order: ClassVar[int]
    default: ClassVar[bool] = True

    @abstractmethod
    def decide(self, model: nn.Module, context: Context) -> Decision:
        """On or not, and why. Must not change the model, and must work on meta tensors."""

    @abstractmethod
    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        """The places in the order in which they will be changed. Must not change the model."""

    @abstractmethod
    def apply(self, target: Any, sites: Sequence[Site], context: Context) -> None:
        """Changes exactly `sites` of `target`: the model (stage ``module``) or `StepParts` (stage ``step``)."""

    def describe(self, sites: Sequence[Site]) -> str:
        """The plan's line: each kind of site and how often, e.g. ``rms_norm ×37  geglu ×36``."""
        counts: dict[str, int] = {}
        for site in sites:
            counts[site.what] = counts.get(site.what, 0) + 1
        return "  ".join(f"{what} ×{count}" for what, count in counts.items())
