"""Schedules against transformers' own, the published recipes, and what must hold past the end."""

import math

import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.runtime.schedules import STYLES, Schedule, fit_to_run

optimization = pytest.importorskip("transformers.optimization")

LR, FLOOR, WARM, TOTAL = 3e-4, 2e-6, 7, 53
THEIRS = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 3.0},
    "polynomial": {"lr_end": 1e-6, "power": 2.5},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr": FLOOR},
    "cosine_warmup_with_min_lr": {"min_lr": FLOOR},
}


def reference(style: str, warmup: int, steps: int) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=LR)
    scheduler = optimization.get_scheduler(style, optimizer, warmup, TOTAL, THEIRS[style])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, WARM])
@pytest.mark.parametrize("style", sorted(THEIRS))
def test_equals_transformers(style, warmup):
    ours = Schedule(style, warmup, TOTAL, cycles=3.0, end_lr=1e-6, power=2.5)
    theirs = reference(style, warmup, TOTAL)
    for step in range(TOTAL):
        wanted = pytest.approx(theirs[step], abs=1e-12 * LR, rel=1e-12)
        assert ours.lr_at(step, LR, FLOOR) == wanted, (style, step)


@pytest.mark.parametrize("style", sorted(STYLES))
def test_one_call_serves_all_groups_and_needs_no_host(style):
    schedule = Schedule(style, WARM, TOTAL)
    base, floor = torch.tensor([1e-3, 1e-4, 1e-7]), torch.tensor([1e-6, 5e-5, 1e-6])
    for step in (0, 3, WARM, 30, TOTAL, 4 * TOTAL):
        together = schedule.lr(torch.tensor(step), base, floor)
        alone = [schedule.lr_at(step, float(b), float(f)) for b, f in zip(base, floor)]
        assert together.dtype == torch.float64 and together.shape == (3,)
        assert together.tolist() == pytest.approx(alone, rel=1e-12, abs=1e-20)


FLOORED = ["cosine_with_min_lr", "cosine_warmup_with_min_lr", "openpi_cosine", "lerobot_cosine"]


@pytest.mark.parametrize("style", FLOORED)
def test_each_group_ends_at_its_own_floor_and_stays(style):
    base, floor = torch.tensor([1e-3, 1e-4, 1e-7]), torch.tensor([1e-6, 5e-5, 1e-6])
    for step in (TOTAL, TOTAL + 20, 10 * TOTAL):
        rates = Schedule(style, WARM, TOTAL).lr(torch.tensor(step), base, floor).tolist()
        assert rates == pytest.approx([1e-6, 5e-5, 1e-7], rel=1e-6)  # a floor above the rate is the rate


def test_decay_does_not_climb_after_its_end():
    for style in ("linear", "cosine", "cosine_with_restarts"):
        assert Schedule(style, WARM, TOTAL).lr_at(int(1.5 * TOTAL), LR) == pytest.approx(0.0, abs=1e-18)


def test_lambda_linear_cycles():
    c = Schedule("lambda_linear", warmup=10, total=1000, f_start=0.1, f_max=0.8, f_min=0.2, cycle_length=50)
    expected = [0.1 + 0.7 * n / 10 if n < 10 else 0.2 + 0.6 * (50 - n) / 40 for n in range(50)]
    assert [c.lr_at(s, 1.0) for s in range(150)] == pytest.approx(expected * 3, rel=1e-12)
    whole = Schedule("lambda_linear", warmup=10, total=100, f_max=1.0)
    assert whole.lr_at(55, 1.0) == pytest.approx(0.5) and whole.lr_at(100, 1.0) == 0.0
    all_warmup = Schedule("lambda_linear", warmup=50, total=50)
    assert all(math.isfinite(all_warmup.lr_at(s, 1.0)) for s in range(120))


def test_published_recipes():
    """openpi's and lerobot's rules, worked out by hand for lr 2.5e-5, floor 2.5e-6, 1000 and 30000 steps."""
    lr, floor = 2.5e-5, 2.5e-6
    openpi, lerobot = Schedule("openpi_cosine", 1000, 30_000), Schedule("lerobot_cosine", 1000, 30_000)
    for schedule in (openpi, lerobot):
        assert schedule.lr_at(0, lr, floor) == pytest.approx(lr / 1001, rel=1e-12)
        assert schedule.lr_at(500, lr, floor) == pytest.approx(lr / 1001 + (lr - lr / 1001) / 2, rel=1e-12)
        assert schedule.lr_at(30_000, lr, floor) == pytest.approx(floor, rel=1e-12)
    assert openpi.lr_at(1000, lr, floor) == pytest.approx(lr, rel=1e-12)
    below = floor + (lr - floor) * 0.5 * (1 + math.cos(math.pi / 30))
    assert lerobot.lr_at(1000, lr, floor) == pytest.approx(below, rel=1e-12)
    short = fit_to_run(lerobot, 3000)
    assert (short.warmup, short.total) == (100, 3000)
    assert fit_to_run(lerobot, 30_000) is lerobot and fit_to_run(openpi, 3000) is openpi


def test_unknown_style_names_the_nearest():
    with pytest.raises(UserError, match="cosine_with_min_lr"):
        Schedule("cosine_min_lr", 0, 10)
    with pytest.raises(UserError, match="warm-up >= 0"):
        Schedule("cosine", -1, 10)
