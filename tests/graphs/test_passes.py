"""Passes keep the maths: `exact` ones bit for bit over ten steps, `reorder` ones within rounding, alone or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlaforge.data.collate import trimmed
from vlaforge.graphs import registry
from vlaforge.graphs.packing import join, packed_parts, split
from vlaforge.graphs.passes import fuse as fuse_pass

REORDER = ("fuse", "pack", "trim_tokens", "static_shapes", "hoist", "optimizer")
RTOL = 1e-4


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """The oneDNN executor is taken whatever is faster on the machine that tests."""
    monkeypatch.setattr(fuse_pass.cpu, "prefers_onednn", lambda: True)


@pytest.fixture(scope="module")
def eager(tiny):
    """Ten steps of the model as it is declared."""
    model = tiny.model()
    return tiny.train(model, tiny.only(model))


def close(got, want, rtol=RTOL):
    return all(abs(a - b) <= rtol * abs(b) for a, b in zip(got, want, strict=True))


def test_eager_reference_has_no_pass_on_and_learns(eager):
    assert [entry.name for entry in eager.plan.entries if entry.state == "on"] == []
    assert len(set(eager.losses)) == len(eager.losses)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_remat_is_exact(tiny, eager, mode):
    model = tiny.model()
    run = tiny.train(model, tiny.only(model, "remat", remat=mode))
    assert run.plan.on("remat") and run.losses == eager.losses


def test_overlap_is_exact(tiny, eager):
    model = tiny.model()
    run = tiny.train(model, tiny.only(model, "overlap"))
    assert run.plan.on("overlap") and run.losses == eager.losses


def test_allocator_is_exact(tiny, eager):
    model = tiny.model()
    run = tiny.train(model, tiny.only(model, "allocator"))
    if not run.plan.on("allocator"):
        pytest.skip(run.plan.entry("allocator").reason)
    assert run.losses == eager.losses


def test_freeze_is_exact(tiny):
    """Frozen by the pass or by hand: the same losses, and the frozen weights stay."""
    name, paths = next(iter(tiny.model().towers().items()))
    first, second = tiny.model(), tiny.model()
    frozen = frozenset(
        key for key, _ in first.named_parameters() if any(key == p or key.startswith(p + ".") for p in paths)
    )
    for key in frozen:
        second.get_parameter(key).requires_grad_(False)
    before = {key: first.get_parameter(key).detach().clone() for key in frozen}
    run = tiny.train(first, tiny.only(first, "freeze", frozen=frozen))
    hand = tiny.train(second, tiny.only(second))
    assert run.plan.on("freeze"), name
    assert run.losses == hand.losses
    assert all(torch.equal(first.get_parameter(key), value) for key, value in before.items())
    assert all(first.get_parameter(key).grad is None for key in frozen)


@pytest.mark.parametrize("name", REORDER)
def test_each_reorder_pass_alone(tiny, eager, name):
    model = tiny.model()
    plan = tiny.only(model, name) if name != "static_shapes" else tiny.only(model, "trim_tokens", name)
    if not plan.on(name):
        pytest.skip(plan.entry(name).reason)
    run = tiny.train(model, plan)
    assert close(run.losses, eager.losses)


def test_all_passes_without_compile(tiny, eager):
    model = tiny.model()
    run = tiny.train(model, tiny.plan(model, compile="off", remat="selective"))
    assert run.plan.on("pack") or run.plan.on("fuse")
    assert close(run.losses, eager.losses)


def test_gradients_of_all_passes(tiny):
    """One backward: each canonical gradient agrees with the eager one, packed ones taken apart."""
    plain, lowered = tiny.model(), tiny.model()
    plan = tiny.plan(lowered, compile="off", remat="full")
    plan.lower(lowered)
    minibatch = tiny.batch(3)
    plain(minibatch.batch, minibatch.draw).total().backward()
    lowered(trimmed(minibatch.batch, plan.trims), minibatch.draw).total().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    grads = split(lowered, {name: p.grad for name, p in lowered.named_parameters() if p.grad is not None})
    assert set(wanted) <= set(grads)
    total = torch.stack([g.norm() for g in wanted.values()]).norm()
    for name, want in wanted.items():
        assert (grads[name] - want).norm() <= RTOL * want.norm() + 1e-6 * total, name


@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.sets(st.sampled_from([*REORDER, "remat", "overlap", "freeze"]), min_size=2, max_size=6))
def test_random_subsets(tiny, eager, chosen):
    model = tiny.model()
    run = tiny.train(model, tiny.only(model, *chosen), steps=3)
    assert close(run.losses, eager.losses[:3]), (chosen, run.plan.text())


def test_compiled_whole_plan(pi05):
    """Everything that runs on a CPU, compiled by Inductor, with recompute inside: one compile serves both claims."""
    plain, model = pi05.model(), pi05.model()
    want = pi05.train(plain, pi05.only(plain))
    run = pi05.train(model, pi05.plan(model, compile="on", remat="selective", buckets=48))
    assert run.plan.on("compile_blocks") and run.plan.on("static_shapes") and run.plan.on("remat")
    assert close(run.losses, want.losses)


def test_bf16_keeps_masters_and_learns_like_fp32(pi05):
    plain, model = pi05.model(), pi05.model()
    want = pi05.train(plain, pi05.only(plain))
    plan = pi05.plan(model, dtype="bf16", compile="off")
    run = pi05.train(model, plan)
    assert plan.on("precision") and plan.on("fuse")
    assert close(run.losses, want.losses, rtol=2e-2)
    low = {leaf.name for leaf in run.optimizer.leaves if leaf.param.dtype == torch.bfloat16}
    assert low and all(leaf.master is not None for leaf in run.optimizer.leaves if leaf.name in low)
    kept = model.expert_norm, model.action_in, model.time.time_in
    assert all(p.dtype == torch.float32 for module in kept for p in module.parameters())


def test_masters_hold_the_exact_fp32_weights(pi05):
    """Through precision, pack and hoist: what the optimiser starts from is the fp32 value, not the bf16 one."""
    plain, model = pi05.model(), pi05.model()
    plan = pi05.plan(model, dtype="bf16", compile="off")
    plan.lower(model)
    masters = {name: getattr(p, "_master_fp32", p.detach()) for name, p in model.named_parameters() if p.requires_grad}
    masters = split(model, masters)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(masters[name], parameter), name


def test_state_dict_speaks_canonical_names(tiny):
    """A lowered model saves what a plain one loads, and the other way round, bit for bit."""
    plain, lowered = tiny.model(0), tiny.model(1)
    plan = tiny.plan(lowered, compile="off", remat="full")
    plan.lower(lowered)
    assert bool(packed_parts(lowered)) == (plan.on("pack") or plan.on("hoist"))
    saved = lowered.state_dict()
    assert set(saved) == set(plain.state_dict())
    plain.load_state_dict(saved, strict=True)
    other = tiny.model(2)
    lowered.load_state_dict(other.state_dict(), strict=True)
    minibatch = tiny.batch(0)
    got = float(lowered(minibatch.batch, minibatch.draw).total())
    assert got == pytest.approx(float(other(minibatch.batch, minibatch.draw).total()), rel=RTOL)
    assert float(plain(minibatch.batch, minibatch.draw).total()) != pytest.approx(got, rel=RTOL)


def test_load_names_a_missing_part(pi05):
    model = pi05.model()
    pi05.plan(model, compile="off").lower(model)
    state = model.state_dict()
    del state["layers.0.language.qkv.k_proj.weight"]
    with pytest.raises(RuntimeError, match=r"layers\.0\.language\.qkv\.(k_proj|packed)\.weight"):
        model.load_state_dict(state, strict=True)


def test_optimizer_state_splits_and_joins(pi05):
    model = pi05.model()
    run = pi05.train(model, pi05.plan(model, compile="off"), steps=2)
    moments = {leaf.name: leaf.state["exp_avg"] for leaf in run.optimizer.leaves if leaf.state}
    canonical = split(model, moments)
    assert "layers.0.language.qkv.k_proj.weight" in canonical
    back = join(model, canonical)
    assert set(back) == set(moments) and all(torch.equal(back[name], value) for name, value in moments.items())
    part = dict(canonical)
    del part["layers.0.language.qkv.k_proj.weight"]
    with pytest.raises(KeyError, match="k_proj"):
        join(model, part)
    counts = split(model, {name: torch.tensor(2.0) for name in moments})
    counts["layers.0.language.qkv.k_proj.weight"] = torch.tensor(1.0)
    with pytest.raises(ValueError, match="stepped apart"):
        join(model, counts)


def test_trimming_changes_no_loss(pi05):
    """Garbage in what is cut, or none of it there: the loss is the same."""
    model = pi05.model()
    plan = pi05.only(model, "trim_tokens")
    minibatch = pi05.batch(5)
    full = model(minibatch.batch, minibatch.draw).total()
    cut = trimmed(minibatch.batch, plan.trims)
    assert cut["images"].shape[1] < minibatch.batch["images"].shape[1]
    assert cut["tokens"].shape[1] < minibatch.batch["tokens"].shape[1]
    assert float(model(cut, minibatch.draw).total()) == pytest.approx(float(full), rel=1e-5)


def test_static_shapes_leaves_few_lengths(pi05):
    model = pi05.model()
    plan = pi05.only(model, "trim_tokens", "static_shapes", buckets=16)
    lengths = {trimmed(pi05.batch(seed).batch, plan.trims)["tokens"].shape[1] for seed in range(12)}
    free = pi05.only(model, "trim_tokens")
    assert lengths <= {16, 32, 48} and len(lengths) < 4
    assert plan.feed.trims == plan.trims and replace(plan.feed, trims=()) == replace(pi05.contract, trims=())
    assert {t.multiple for t in free.trims} != {t.multiple for t in plan.trims}


def test_every_pass_is_tested_here_or_needs_a_gpu():
    needs_gpu = {"graph_blocks", "graph_step", "flex_attention", "flash_attention"}
    covered = {*REORDER, "remat", "overlap", "freeze", "allocator", "precision", "compile_blocks"}
    covered.add("embodiments")  # test_embodiments.py: it needs to be told what the data has
    assert {rule.name for rule in registry()} == covered | needs_gpu
