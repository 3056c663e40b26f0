"""Learning-rate schedules as functions of a step tensor: float64 on the device, so a step needs no host.

A schedule gives each parameter group its rate at step s (0 is the first update), with W = warm-up steps,
T = the step at which decay ends, base and floor [G] the group's own rates:

    warm-up (most styles)        base · s / W                                            s < W
    linear                       base · (T - s) / (T - W)
    cosine                       base · ½(1 + cos πp),                 p = (s - W) / (T - W)
    cosine_with_restarts         base · ½(1 + cos π(np mod 1)),        n = cycles, 0 once p >= 1
    polynomial                   end + (base - end)(1 - p)^power
    inverse_sqrt                 base / sqrt(s / W),                   W or 10000 when there is no warm-up
    cosine_with_min_lr           floor + (base - floor) · ½(1 + cos πp)
    cosine_warmup_with_min_lr    warm-up base · (s + 1) / W, then the same with p = (s + 1 - W) / (T - W)
    lambda_linear                base · f, f from f_start to f_max over W, then to f_min at a cycle's end
    constant, constant_with_warmup
    openpi_cosine                warm-up from base / (W + 1), then as cosine_with_min_lr
    lerobot_cosine               the same warm-up, then p = s / T: decay counts the warm-up's steps as well

All but the last two and lambda_linear are those of `transformers.optimization` (5.x) up to step T. Past T,
where its cosine climbs again, ours stays at the end value. `floor` is an absolute rate; each group keeps its
own. `lambda_linear` repeats: past one cycle the next begins, warm-up included. Sources of the last two:
openpi's train_pytorch.py and lerobot's CosineDecayWithWarmup (which also shrinks W and T when the run is
shorter than T).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlaforge.data.errors import UserError, unknown
from vlaforge.runtime.args import TrainingArgs


@dataclass(frozen=True)
class Schedule:
    """One schedule with its settings.

    Args:
        style: a key of `STYLES`.
        warmup: W, steps of warm-up (>= 0).
        total: T, the step at which decay ends (>= 1).
        cycles: of cosine_with_restarts.
        end_lr, power: of polynomial; `end_lr` is absolute.
        f_start, f_max, f_min, cycle_length: of lambda_linear; `cycle_length` None means `total`.
    """

    style: str
    warmup: int
    total: int
    cycles: float = 1.0
    end_lr: float = 1e-7
    power: float = 1.0
    f_start: float = 0.0
    f_max: float = 0.4
    f_min: float = 0.0
    cycle_length: int | None = None

    @property
    def highest(self) -> float:
        """The largest rate as a multiple of a group's own."""
        return max(1.0, self.f_start, self.f_max, self.f_min) if self.style == "lambda_linear" else 1.0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise unknown("learning-rate schedule", self.style, STYLES)
        if self.warmup < 0 or self.total < 1:
            raise UserError(
                f"A schedule needs warm-up >= 0 and decay steps >= 1, not {self.warmup} and {self.total}."
            )

    def lr(self, step: Tensor, base: Tensor, floor: Tensor) -> Tensor:
        """Rates [G] float64 for the update number `step` (0-dim, any dtype), from `base` and `floor` [G]."""
        s = step.to(torch.float64)
        base, floor = base.to(torch.float64), torch.minimum(floor, base).to(torch.float64)
        return STYLES[self.style](self, s, base, floor)

    def lr_at(self, step: int, base: float, floor: float = 0.0) -> float:
        """The same on the host, for one group."""
        values = (torch.tensor(float(x), dtype=torch.float64) for x in (step, base, floor))
        return float(self.lr(*values))

    def _progress(self, s: Tensor) -> Tensor:
        return ((s - self.warmup) / max(1, self.total - self.warmup)).clamp(0.0, 1.0)

    def _warm(self, s: Tensor, base: Tensor, after: Tensor) -> Tensor:
        """`after`, but linear from 0 to `base` during warm-up."""
        return torch.where(s < self.warmup, base * s / max(1, self.warmup), after)


def _half_cosine(p: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.cos(math.pi * p))


def _linear(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    return c._warm(s, base, base * (1.0 - c._progress(s)))


def _cosine(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    return c._warm(s, base, base * _half_cosine(c._progress(s)))


def _restarts(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    p = c._progress(s)
    value = torch.where(p >= 1.0, torch.zeros_like(p), _half_cosine((c.cycles * p) % 1.0))
    return c._warm(s, base, base * value)


def _polynomial(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    end = base.clamp_max(c.end_lr)
    return c._warm(s, base, end + (base - end) * (1.0 - c._progress(s)) ** c.power)


def _constant(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    return base + 0.0 * s


def _constant_warm(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    return c._warm(s, base, base)


def _inverse_sqrt(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    scale = c.warmup or 10_000
    shifted = (s + (scale - c.warmup)).clamp_min(1.0)
    return c._warm(s, base, base / torch.sqrt(shifted / scale))


def _cosine_min(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    return c._warm(s, base, floor + (base - floor) * _half_cosine(c._progress(s)))


def _cosine_warmup_min(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    after = floor + (base - floor) * _half_cosine(c._progress(s + 1.0))
    return torch.where(s < c.warmup, base * (s + 1.0) / max(1, c.warmup), after)


def _lambda_linear(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    length = c.cycle_length or c.total
    n = s % length
    rising = c.f_start + (c.f_max - c.f_start) * n / max(1, c.warmup)
    falling = c.f_min + (c.f_max - c.f_min) * (length - n) / max(1, length - c.warmup)
    return base * torch.where(n < c.warmup, rising, falling)


def _published_warm(c: Schedule, s: Tensor, base: Tensor, after: Tensor) -> Tensor:
    """Warm-up of openpi and lerobot: from base / (W + 1), not from zero."""
    first = base / (c.warmup + 1)
    return torch.where(s < c.warmup, first + (base - first) * s / max(1, c.warmup), after)


def _openpi(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    return _published_warm(c, s, base, floor + (base - floor) * _half_cosine(c._progress(s)))


def _lerobot(c: Schedule, s: Tensor, base: Tensor, floor: Tensor) -> Tensor:
    p = (s / c.total).clamp(0.0, 1.0)
    return _published_warm(c, s, base, floor + (base - floor) * _half_cosine(p))


STYLES: dict[str, Callable[[Schedule, Tensor, Tensor, Tensor], Tensor]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant_warm,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_min,
    "cosine_warmup_with_min_lr": _cosine_warmup_min,
    "lambda_linear": _lambda_linear,
    "openpi_cosine": _openpi,
    "lerobot_cosine": _lerobot,
}


def fit_to_run(schedule: Schedule, train_iters: int) -> Schedule:
    """lerobot's rule: a run shorter than the decay shrinks warm-up in proportion and decays to its end."""
    if schedule.style != "lerobot_cosine" or train_iters >= schedule.total:
        return schedule
    return replace(schedule, warmup=int(schedule.warmup * train_iters / schedule.total), total=train_iters)


def build_schedule(args: TrainingArgs) -> Schedule:
    """The learning-rate schedule of the flags."""
    schedule = Schedule(
        args.lr_decay_style,
        warmup=args.lr_warmup_iters,
        total=args.lr_decay_iters or args.train_iters,
        cycles=args.num_cycles,
        end_lr=args.lr_end,
        power=args.polynomial_power,
        f_start=args.lambda_f_start,
        f_max=args.lambda_f_max,
        f_min=args.lambda_f_min,
        cycle_length=args.lambda_cycle_length,
    )
    return fit_to_run(schedule, args.train_iters)
