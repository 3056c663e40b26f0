"""Costs against counts by hand: FLOPs of products, bytes, activation memory, chains, and what each pass removes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlaforge import models
from vlaforge.data.schema import Batch, Contract, Draw, Field
from vlaforge.graphs import PlanOptions
from vlaforge.graphs.cost import count_step, meta_inputs, pass_shares, step_cost
from vlaforge.graphs.devices import KINDS, DeviceKind
from vlaforge.models.base import BlockGroup, EmbodiedModel, Losses, LossTerm

B, T, D, F = 4, 8, 32, 64
ROUND = DeviceKind("round", "round", 1e9, 1e9, 0, 1e9, 1e12)
OPTIONS = PlanOptions(device="cpu", batch_size=B)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(EmbodiedModel):
    """Two residual MLPs: everything about it can be counted by hand."""

    family = "stack"

    def __init__(self, config=None):
        super().__init__(config)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    @classmethod
    def contract(cls, config):
        return Contract({"x": Field((T, D), torch.float32, "TD")}, {})

    def loss(self, batch, draw):
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return Losses({"sum": LossTerm(x.sum(), torch.ones((), device=x.device))})

    def counts(self, batch):
        return {"sum": torch.ones(())}

    def act(self, obs, draw, steps):
        return obs["x"]

    def blocks(self):
        return [BlockGroup("layers", ("layers.0", "layers.1"))]


@pytest.fixture(scope="module")
def counted():
    with torch.device("meta"):
        model = Stack()
    batch, draw = meta_inputs(Stack.contract(None), B)
    return count_step(model, batch, draw, OPTIONS)


def test_flops_of_products(counted):
    """Forward 2·M·N·K a product; backward twice that, except that the first layer's input needs no gradient."""
    product = 2 * B * T * D * F
    assert counted.kinds["layers", "forward"].flops == 4 * product
    assert counted.kinds["layers", "backward"].flops == 8 * product - product
    assert counted.calls == {"layers": 2}


def test_bytes_of_the_forward(counted):
    """Up: x, W, h. Relu: h, h. Down: h, W, y. Add: x, y, sum. fp32."""
    x, h, w = B * T * D, B * T * F, D * F
    layer = (x + w + h) + 2 * h + (h + w + x) + 3 * x
    tally = counted.kinds["layers", "forward"]
    assert tally.bytes == 2 * 4 * layer
    assert tally.pointwise == 2 * 4 * (2 * h + 3 * x)
    assert (tally.ops, tally.pointwise_ops) == (8, 4)


def test_activation_memory(counted):
    """Kept for the backward: relu's output and the residual stream that the second layer reads. Scalars besides."""
    x, h = B * T * D * 4, B * T * F * 4
    assert 0 <= counted.memory.activations - (2 * h + x) <= 64
    weights = 4 * D * F * 4
    assert counted.memory.weights == counted.memory.gradients == weights
    assert counted.memory.optimizer == 2 * weights and counted.memory.masters == 0
    assert counted.memory.batch == x


def test_chains_keep_what_stays_inside():
    """relu·2 + 1 between two products: three ops, one kernel, one read and one write."""

    class Chain(Stack):
        def loss(self, batch, draw):
            w = self.layers[0].up.weight
            y = (torch.relu(batch["x"] @ w.T) * 2 + 1) @ w
            return Losses({"sum": LossTerm(y.sum(), torch.ones((), device=y.device))})

    with torch.device("meta"), torch.no_grad():
        model = Chain()
    batch, draw = meta_inputs(Stack.contract(None), B)
    model.requires_grad_(False)
    tally = count_step(model, batch, draw, OPTIONS).kinds["(outside)", "forward"]
    h = B * T * F * 4
    fused = tally.fused()
    assert tally.pointwise_ops - fused.pointwise_ops >= 2
    assert tally.bytes - fused.bytes >= 4 * h


def test_roofline_adds_what_bounds_each_op(counted):
    with torch.device("meta"):
        model = Stack()
    options = PlanOptions(device="cpu", batch_size=B)
    object.__setattr__(options, "device_kind", ROUND)
    batch, draw = meta_inputs(Stack.contract(None), B)
    cost = count_step(model, batch, draw, options)
    tally = cost.kinds["layers", "forward"]
    product = 2 * B * T * D * F / 1e9
    assert tally.products_s == pytest.approx(4 * product)  # 0.13 ms of FLOPs against 0.02 ms of bytes each
    assert cost.device_seconds(tally) == pytest.approx(4 * product + tally.pointwise / 1e9)
    assert cost.seconds() == cost.device_seconds()


def test_attention_is_counted_as_a_blocked_kernel(tiny):
    """No scores in memory, and 2·2·B·H·T·S·K FLOPs forward: quadrupling a long sequence's attention is seen."""
    q = torch.empty(2, 4, 64, 16, device="meta", requires_grad=True)

    class Attend(Stack):
        def loss(self, batch, draw):
            y = nn.functional.scaled_dot_product_attention(q, q, q)
            return Losses({"sum": LossTerm(y.sum(), torch.ones((), device=y.device))})

    with torch.device("meta"):
        model = Attend()
    cost = count_step(model, Batch(), Draw(), OPTIONS)
    assert cost.kinds["(outside)", "forward"].flops == 2 * 2 * 2 * 4 * 64 * 64 * 16
    assert cost.kinds["(outside)", "backward"].flops == 5 * 2 * 2 * 4 * 64 * 64 * 16
    assert cost.memory.activations < 2 * 4 * 64 * 64 * 4


def test_every_family_can_be_counted(tiny):
    with torch.device("meta"):
        model = tiny.family.model(tiny.config)
    cost, plan = step_cost(model, tiny.contract, PlanOptions(device="h200", dtype="bf16", batch_size=2))
    for group in model.blocks():
        forward, backward = (cost.kinds[group.path, way].flops for way in ("forward", "backward"))
        assert 0 < forward < backward <= 2.6 * forward
    assert all(kind in {*cost.calls, "(outside)"} for kind, _ in cost.kinds)
    assert {group.path for group in model.blocks()} <= set(cost.calls)
    assert plan.on("precision") and cost.memory.masters > 0 and "total" in cost.text()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_full_size_memory_and_recompute():
    """π0.5 at batch 8: recompute saves memory for FLOPs, in order; 3.36 B trained parameters in 12 + 4 bytes."""
    family = models.family("pi05")
    with torch.device("meta"):
        model = family.model(family.config())
    contract = family.model.contract(model.config)
    base = {"device": "h200", "dtype": "bf16", "batch_size": 8}
    costs = [step_cost(model, contract, PlanOptions(**base, remat=mode))[0] for mode in ("none", "selective", "full")]
    peaks, flops = [c.memory.peak for c in costs], [c.total.flops for c in costs]
    assert peaks[0] > 1.3 * peaks[1] > 4 * peaks[2]
    assert flops[0] <= flops[1] < flops[2] < 1.4 * flops[0]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = costs[0].memory.optimizer + costs[0].memory.masters
    assert 11.5 * trained < held <= 12 * trained
    sharded = step_cost(model, contract, PlanOptions(**base, strategy="fsdp", world=8))[0]
    assert sharded.memory.optimizer < costs[0].memory.optimizer / 7


def test_shares_of_passes(pi05):
    with torch.device("meta"):
        model = pi05.family.model(pi05.config)
    options = PlanOptions(device="h200", dtype="bf16", batch_size=8, without=("freeze", "overlap", "optimizer"))
    shares = {s.name: s for s in pass_shares(model, pi05.contract, options, {"token_mask": 16, "image_mask": 1})}
    full, cut = 2 * 64 + 48, 64 + 16
    assert shares["trim_tokens"].flops == pytest.approx(1 - cut / full, abs=0.1)
    assert shares["precision"].bytes > 0.2 and shares["fuse"].bytes > 0.05 and shares["compile_blocks"].bytes > 0.02
    assert shares["graph_step"].launches > 0.99 and shares["pack"].flops == 0
    assert "trim_tokens" in shares["trim_tokens"].text()


def test_device_table_is_plausible():
    for kind in KINDS.values():
        if kind.cuda:
            assert kind.bf16 > kind.fp32 > 1e13 and 1e12 < kind.bandwidth < 1e13 and kind.memory > 7e10
