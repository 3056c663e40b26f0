"""The plan: made without touching the model, said in text and JSON, steered by name and by fuel."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from torch import nn

from vlaforge import models
from vlaforge.data.errors import UserError
from vlaforge.graphs import Decision, Pass, PlanOptions, Site, make_plan, registry
from vlaforge.graphs import plan as plan_module
from vlaforge.graphs.passes import flash_attention as flash_pass
from vlaforge.graphs.passes.base import claim


@pytest.fixture(scope="module")
def full():
    """The full-size model on the meta device, and its contract."""
    family = models.family("pi05")
    with torch.device("meta"):
        model = family.model(family.config())
    return model, family.model.contract(model.config)


def test_full_size_plan_on_two_devices_takes_seconds(full):
    began = time.process_time()  # a machine with other work takes longer for as much
    on_cpu = make_plan(*full, PlanOptions(device="cpu"))
    on_gpu = make_plan(*full, PlanOptions(device="h200", dtype="bf16", batch_size=32, with_=("graph_blocks",)))
    assert time.process_time() - began < 10
    assert all(parameter.is_meta for parameter in full[0].parameters())
    head = on_gpu.text().splitlines()[0]
    assert head == "forge plan   pi05 · 3.6 B parameters · bf16 · 1 × H200 · batch 32 · actions 50 × 32"
    for name in ("precision", "fuse", "pack", "trim_tokens", "static_shapes", "hoist", "compile_blocks", "graph_step"):
        assert on_gpu.on(name) or name == "graph_step", name
    assert on_cpu.entry("graph_step").reason == "needs a CUDA device" and not on_cpu.on("precision")


def test_text_numbers_every_pass_and_aligns(full):
    lines = make_plan(*full, PlanOptions(device="h200", dtype="bf16")).text().splitlines()[1:]
    shape = re.compile(r"^ ?(\d+) (on|skip|off) +([a-z_]+) +\S.* (exact|reorder|approx)$")
    found = [shape.match(line) for line in lines]
    assert all(found) and [int(m[1]) for m in found] == list(range(1, len(registry()) + 1))
    assert {m[3] for m in found} == {rule.name for rule in registry()}
    fuse = next(line for line in lines if " fuse " in line)
    assert "rms_norm ×37" in fuse and "glu ×36" in fuse and "rotary ×36" in fuse


def test_json_is_whole(full):
    plan = make_plan(*full, PlanOptions(device="h200", dtype="bf16", without=("pack",), fuel=10))
    body = json.loads(json.dumps(plan.json()))
    assert body["options"]["device"] == "h200" and body["options"]["fuel"] == 10
    states = {entry["name"]: entry["state"] for entry in body["passes"]}
    assert states["pack"] == "off" and states["freeze"] == "on"
    assert sum(len(entry["sites"]) for entry in body["passes"]) == 10


def test_unknown_names_are_errors(full):
    with pytest.raises(UserError, match="did you mean 'graph_step'"):
        make_plan(*full, PlanOptions(device="cpu", with_=("graphstep",)))
    with pytest.raises(UserError, match="hoist"):
        make_plan(*full, PlanOptions(device="cpu", without=("hoists",)))
    with pytest.raises(UserError, match="both in --with and in --without"):
        PlanOptions(device="cpu", with_=("pack",), without=("pack",))
    with pytest.raises(UserError, match="rtx_pro_6000"):
        PlanOptions(device="rtx6000")
    with pytest.raises(UserError, match="give one of none, selective, full"):
        PlanOptions(device="cpu", remat="some")
    with pytest.raises(UserError, match="float32, bfloat16, float16"):
        PlanOptions(device="cpu", dtype="int8")


def test_asked_for_but_not_applicable_is_a_warning(full):
    plan = make_plan(*full, PlanOptions(device="cpu", with_=("graph_step", "precision")))
    assert plan.warnings == (
        "'precision' was asked for but does not apply: fp32 was asked for (--dtype bf16 computes in bf16)",
        "'graph_step' was asked for but does not apply: needs a CUDA device",
    )
    assert plan.text().splitlines()[-1] == f" ! {plan.warnings[-1]}"


def test_attention_by_other_executors_is_asked_for(full, monkeypatch):
    bf16 = {"device": "h200", "dtype": "bf16"}
    plan = make_plan(*full, PlanOptions(**bf16, with_=("flex_attention",)))
    assert plan.entry("flex_attention").reason.startswith("attention ×63: calls that are causal with padding")
    assert "--with flash_attention" in plan.entry("flash_attention").reason
    monkeypatch.setattr(flash_pass, "flash_installed", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'vlaforge\[flash-attn\]'"):
        make_plan(*full, PlanOptions(**bf16, with_=("flash_attention",)))
    monkeypatch.setattr(flash_pass, "flash_installed", lambda: True)
    both = make_plan(*full, PlanOptions(**bf16, with_=("flash_attention", "flex_attention")))
    assert both.on("flash_attention") and both.on("flex_attention") and not both.warnings
    assert "bf16" in make_plan(*full, PlanOptions(device="h200", with_=("flash_attention",))).warnings[0]


def test_decisions_lean_on_each_other(full):
    varying = make_plan(*full, PlanOptions(device="h200", without=("static_shapes",)))
    assert varying.entry("graph_step").reason == "length of token_mask varies: add `static_shapes`"
    assert not varying.on("compile_blocks")
    whole = make_plan(*full, PlanOptions(device="h200", without=("trim_tokens",)))
    assert whole.on("graph_step") and not whole.on("static_shapes")
    assert make_plan(*full, PlanOptions(device="h200", strategy="fsdp", world=8)).entry("hoist").state == "skip"
    lora = make_plan(*full, PlanOptions(device="h200", adapters=True))
    assert "adapters" in lora.entry("pack").reason


def test_parameters_of_two_groups_are_not_packed(full):
    groups = {name: "fast" if "k_proj" in name else "slow" for name, _ in full[0].named_parameters()}
    sites = make_plan(*full, PlanOptions(device="cpu", groups=groups)).entry("pack").sites
    assert {site.what for site in sites} == {"gate_up"}


def test_fuel_applies_the_first_sites_only(pi05):
    whole = pi05.plan(pi05.model(), compile="off")
    sites = [(entry.name, site.path) for entry in whole.entries for site in entry.sites]
    for fuel in (0, 1, len(sites) // 2):
        model = pi05.model()
        plan = pi05.plan(model, compile="off", fuel=fuel)
        assert [(entry.name, site.path) for entry in plan.entries for site in entry.sites] == sites[:fuel]
        plan.lower(model)
        minibatch = pi05.batch(0)
        plain = pi05.model()(minibatch.batch, minibatch.draw).total()
        assert float(model(minibatch.batch, minibatch.draw).total()) == pytest.approx(float(plain), rel=1e-4)
    assert "--fuel" in next(entry.reason for entry in plan.entries if entry.state == "skip" and "fuel" in entry.reason)


def test_lowering_twice_is_an_error(pi05):
    model = pi05.model()
    plan = pi05.plan(model, compile="off")
    plan.lower(model)
    with pytest.raises(ValueError, match="lowered already"):
        plan.lower(model)
    with pytest.raises(ValueError, match="lowered already"):
        pi05.plan(model, compile="off")


class Greedy(Pass):
    """Claims the first block's recompute, as remat does."""

    name, numerics, order = "greedy", "exact", 71

    def decide(self, model, context):
        return Decision(True, "")

    def sites(self, model, context):
        first = model.blocks()[0].names[0]
        return [Site(first, "greed", (claim("recompute", first),)), Site("", "spare")]

    def apply(self, target, sites, context):
        target.greed = len(sites)


@pytest.fixture
def greedy(monkeypatch):
    rules = sorted([*registry(), Greedy()], key=lambda rule: (rule.stage != "module", rule.order))
    monkeypatch.setattr(plan_module, "registry", lambda: tuple(rules))


def test_conflicts_are_settled_before_anything_changes(pi05, greedy):
    """Both on by default: the earlier pass keeps the place, the later one its other sites."""
    model = pi05.model()
    plan = pi05.plan(model, compile="off", remat="full")
    assert plan.on("remat") and [site.what for site in plan.entry("greedy").sites] == ["spare"]
    assert "'remat' has the same place" in plan.entry("greedy").reason
    assert not hasattr(model, "greed") and "forward" not in model.blocks()[0].modules(model)[0].__dict__


def test_what_was_asked_for_wins_a_conflict(pi05, greedy):
    plan = pi05.plan(pi05.model(), compile="off", remat="full", with_=("greedy",))
    assert len(plan.entry("greedy").sites) == 2
    assert len(plan.entry("remat").sites) == plan.entry("remat").found - 1


def test_two_asked_for_conflicting_passes_are_an_error(pi05, greedy):
    with pytest.raises(UserError, match="'remat' and 'greedy' both change"):
        pi05.plan(pi05.model(), compile="off", with_=("greedy", "remat"))


def test_graph_step_and_graph_blocks_exclude_each_other(full):
    plan = make_plan(*full, PlanOptions(device="h200", with_=("graph_blocks",)))
    assert plan.on("graph_blocks") and not plan.on("graph_step")
    assert "graph_blocks" in plan.entry("graph_step").reason
    with pytest.raises(UserError, match="ask for one"):
        make_plan(*full, PlanOptions(device="h200", with_=("graph_blocks", "graph_step")))


def test_a_model_without_blocks_to_change_gets_an_honest_plan():
    class Plain(nn.Module):
        family = "plain"

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def blocks(self):
            return []

    from vlaforge.data.schema import Contract

    plan = make_plan(Plain(), Contract({}, {}), PlanOptions(device="cpu", compile="on", remat="full"))
    assert plan.entry("compile_blocks").reason == "nothing in this model to change"
    assert plan.entry("trim_tokens").reason == "the batch has no axis that may be cut"
