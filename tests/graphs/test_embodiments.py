"""`embodiments`: the rows in use train as before, the others stay, and everything that is saved is whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vlaforge.data.errors import UserError
from vlaforge.graphs.packing import join, split
from vlaforge.graphs.rows import cut_tables
from vlaforge.models.action.embodiment import ByEmbodiment
from vlaforge.runtime.checkpoint.state import by_key
from vlaforge.runtime.ema import Ema
from vlaforge.runtime.optim import Group, fading
from vlaforge.runtime.params import build_groups, rebind

STEPS = 4
USED = (1, 3)
NO_DECAY = {"base": 0.0}


@pytest.fixture(scope="module", params=["groot_n1_6", "groot_n1_7", "xvla"])
def family(request, tiny_of):
    """A tiny family whose batches have the embodiments `USED` alone."""
    tiny = tiny_of(request.param)
    every = tiny.batch

    def batch(seed):
        minibatch = every(seed)
        minibatch.batch["embodiment"] = torch.tensor(USED).index_select(0, minibatch.batch["embodiment"] % 2)
        return minibatch

    tiny.batch = batch
    return tiny


def planned(tiny, model, *names, fading=NO_DECAY, embodiments=frozenset(USED), **options):
    groups = {name: "base" for name, p in model.named_parameters() if p.requires_grad}
    return tiny.plan(model, embodiments=embodiments, fading=fading, groups=groups, with_=names, **options)


def alone(tiny, model, **options):
    every = [entry.name for entry in tiny.plan(model).entries]
    return planned(tiny, model, without=tuple(name for name in every if name != "embodiments"), **options)


def tables(model):
    """Every parameter by embodiment."""
    modules = ((name, m) for name, m in model.named_modules() if isinstance(m, ByEmbodiment))
    return {f"{name}.{leaf}": m.get_parameter(leaf) for name, m in modules for leaf in m.tables}


def moments(trained):
    """The optimiser's state under canonical names, as a checkpoint has it."""
    return by_key(partial(split, trained.model), trained.optimizer.state_tensors())


@pytest.fixture(scope="module")
def pair(family):
    """The same training with whole tables and with the rows in use, without weight decay."""
    whole, sliced = family.model(), family.model()
    one = family.train(whole, family.only(whole), STEPS, 1e-3, decay=0.0)
    return one, family.train(sliced, alone(family, sliced), STEPS, 1e-3, decay=0.0)


def test_losses_weights_and_moments_are_the_same(family, pair):
    whole, sliced = pair
    assert sliced.plan.on("embodiments") and sliced.losses == whole.losses
    assert {len(table) for table in tables(sliced.model).values()} == {len(USED)}
    assert set(cut_tables(sliced.model)) == set(tables(sliced.model))
    assert family.name != "xvla" or "policy.soft_prompts" in tables(sliced.model)
    got, want = sliced.model.state_dict(), whole.model.state_dict()
    assert list(got) == list(want) and all(torch.equal(got[name], want[name]) for name in want)
    got, want = moments(sliced), moments(whole)
    assert set(got) == set(want) and all(torch.equal(got[name], want[name]) for name in want)


def test_training_goes_on_with_or_without_the_pass(family, pair, make_step):
    """Four steps, then two more the other way: as if nothing had happened."""
    whole, sliced = pair
    after = []
    for start, slices in ((whole, True), (sliced, False)):
        model = family.model(seed=5)
        model.load_state_dict(start.model.state_dict())
        plan = alone(family, model) if slices else family.only(model)
        plan.lower(model).train()
        step, optimizer = make_step(model, 1e-3, 0.0)
        optimizer.load_state(by_key(partial(join, model), moments(start)))
        losses = [float(step([family.batch(seed)])["loss"]) for seed in (STEPS, STEPS + 1)]
        after.append(replace(start, losses=losses, model=model, optimizer=optimizer))
    assert after[0].losses == after[1].losses
    state = [run.model.state_dict() for run in after]
    assert all(torch.equal(state[0][name], state[1][name]) for name in state[0])
    resumed = [moments(run) for run in after]
    assert all(torch.equal(resumed[0][name], resumed[1][name]) for name in resumed[0])


def test_another_embodiment_is_refused(family):
    model = family.model()
    minibatch = family.batch(0)
    alone(family, model).lower(model)
    minibatch.batch["embodiment"] = torch.tensor([1, 2])
    with pytest.raises(UserError, match=r"\[2\].*--without embodiments"):
        model(minibatch.batch, minibatch.draw)


def test_a_moment_outside_is_not_dropped(family, pair):
    whole, _ = pair
    model = family.model()
    alone(family, model).lower(model)
    name, rows = next(iter(cut_tables(model).items()))
    state = moments(whole)
    state[f"exp_avg.{name}"] = state[f"exp_avg.{name}"].clone()
    state[f"exp_avg.{name}"][int(rows.others[0])] += 1
    with pytest.raises(ValueError, match=f"'{name}' has changed for"):
        by_key(partial(join, model), state)


def test_bf16_keeps_exact_masters_and_averages(family):
    """Whole fp32 masters and averages come out, and go into a model that has other values."""
    plain, model = family.model(), family.model()
    every = [entry.name for entry in family.plan(model).entries]
    names = tuple(name for name in every if name not in ("precision", "embodiments"))
    plan = planned(family, model, dtype="bf16", without=names)
    groups = build_groups(model, lr=1e-4, floor=0.0, weight_decay=0.0)
    run = family.train(model, plan, 0, decay=0.0)
    assert plan.on("precision") and plan.on("embodiments")
    assert {name for group in rebind(groups, model) for name in group.params} == {n for g in groups for n in g.params}
    masters = by_key(partial(split, model), run.optimizer.state_tensors())
    average = split(model, Ema(run.optimizer, 0.9).tensors(), "weights")
    for name in cut_tables(model):
        held = masters.get(f"master.{name}", average[name])
        assert torch.equal(held, plain.get_parameter(name)) and torch.equal(average[name], held)
        assert torch.equal(model.state_dict()[name], held.to(model.get_parameter(name).dtype))
    other = family.model(seed=3)
    wide = {f"master.{name}": other.get_parameter(name).detach() for name in cut_tables(model)}
    by_key(partial(join, model), wide)
    name = next(iter(cut_tables(model)))
    rows = cut_tables(model)[name]
    assert torch.equal(rows.rest, other.get_parameter(name)[rows.others])


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_state_dicts_of_shards_are_whole_tables(family, one_rank):
    """Sharded values come out, the plain model's, and go into a model that has other ones."""
    plain, model, other = family.model(), family.model(), family.model(seed=3)
    for sliced in (model, other):
        alone(family, sliced, strategy="fsdp").lower(sliced)
        fully_shard(sliced, mesh=one_rank)
    state, want = model.state_dict(), plain.state_dict()
    assert list(state) == list(want) and all(isinstance(state[name], DTensor) for name in cut_tables(model))
    other.load_state_dict(state)
    for found in (state, other.state_dict()):
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        assert all(torch.equal(whole[name], value) for name, value in want.items())


def test_the_plan_says_what_and_why_not(family):
    model = family.model()
    count, total = len(USED), len(next(iter(tables(model).values())))

    def entry(*names, **options):
        return planned(family, model, *names, **options).entry("embodiments")

    on = entry()
    assert (on.state, on.numerics) == ("on", "reorder") and f"{count} of {total} in use" in on.reason
    assert "embodiments" in planned(family, model).text()
    for options in ({"strategy": "zero1"}, {"strategy": "fsdp"}, {"adapters": True}):
        assert entry(**options).state == "on"
    asked = entry("embodiments", fading={"base": 1e-6})
    assert (asked.state, asked.numerics) == ("on", "approx") and "no longer decays (1e-06 a step)" in asked.reason
    for why, options in {
        "on request": {"fading": {"base": 1e-6}},
        "on request: --with": {"fading": {}},
        "not known": {"embodiments": frozenset()},
        f"all {total}": {"embodiments": frozenset(range(total))},
        "no weights": {"frozen": frozenset(name for name, _ in model.named_parameters())},
    }.items():
        found = entry(**options)
        assert found.state == "skip" and why in found.reason, (why, found.reason)


def test_what_an_untouched_weight_loses():
    groups = [Group("a", 1e-4, 0.0, 1e-5, {}), Group("b", 1e-3, 0.0, 0.0, {})]
    assert fading("ForgeAdamW", groups, 2.0) == {"a": pytest.approx(2e-9), "b": 0.0}
    assert fading("Adam", groups) == fading("SGD", groups) == {"a": float("inf"), "b": 0.0}
