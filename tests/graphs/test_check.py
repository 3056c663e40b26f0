"""The capture check: π0.5's whole training step is clean, and each planted hindrance is named with its line."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

from vlaforge.graphs.check import check_step, only


def test_training_step_of_every_family_is_ready_for_capture(tiny, make_step):
    """Forward, backward, clip, guard, schedule, AdamW and metrics, two micro-batches, lowered without compile; frozen
    encoders have run before, as `overlap` has them."""
    model = tiny.model()
    tiny.plan(model, compile="off").lower(model)
    step, optimizer = make_step(model)
    optimizer.fuse()
    batches = [tiny.batch(seed) for seed in range(2)]
    report = check_step(step, [replace(m, batch=model.encode_frozen(m.batch)) for m in batches])
    assert report.ok, report.text()
    assert report.ops > 500 and "ready for capture" in report.text()


def test_bf16_step_is_ready_for_capture(pi05, make_step):
    model = pi05.model()
    pi05.plan(model, dtype="bf16", compile="off", remat="selective").lower(model)
    report = check_step(make_step(model)[0], [pi05.batch(0)])
    assert report.ok, report.text()


PLANTED = {
    "item": ("sync", lambda x: x * x.sum().item()),
    "bool": ("sync", lambda x: x + 1 if x.sum() > 0 else x),
    "float": ("sync", lambda x: x * float(x.max())),
    "equal": ("sync", lambda x: torch.equal(x, x)),
    "index_by_value": ("sync", lambda x: x[: x.argmax()]),
    "nonzero": ("shape", lambda x: x.nonzero()),
    "mask_index": ("shape", lambda x: x[x > 0]),
    "mask_assign": ("shape", lambda x: x.clone().index_put_((x > 0,), torch.zeros(()))),
    "masked_select": ("shape", lambda x: x.masked_select(x > 0)),
    "unique": ("shape", lambda x: x.unique()),
    "repeat": ("shape", lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64), dim=0)),
    "from_list": ("transfer", lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
    "to_list": ("transfer", lambda x: x.tolist()),
    "cpu": ("transfer", lambda x: x.cpu()),
    "numpy": ("transfer", lambda x: x.numpy()),
    "to_cpu": ("transfer", lambda x: x.to("cpu")),
    "random": ("random", lambda x: x + torch.rand(3)),
    "dropout": ("random", lambda x: nn.functional.dropout(x, 0.5)),
    "attention_dropout": (
        "random",
        lambda x: nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.5),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_hindrance_is_found(name):
    kind, function = PLANTED[name]
    line = inspect.getsourcelines(function)[1]
    report = check_step(function, torch.ones(3, 3))
    found = only(report, [kind])
    assert found, report.text()
    file, number = found[0].where.rsplit(":", 1)
    assert file.endswith("graphs/test_check.py") and line <= int(number) <= line + 3
    assert not report.ok and found[0].code in report.text()


def test_hindrance_inside_a_backward_is_found():
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    def step(x):
        Peek.apply(x).sum().backward()

    report = check_step(step, torch.ones(3, requires_grad=True))
    assert [(f.kind, f.count) for f in report.findings] == [("sync", 1)]
    assert "grad.sum().item()" in report.findings[0].code


def test_a_loop_counts_its_findings_once_with_a_number():
    def step(x):
        return [value.item() for value in x]

    (finding,) = check_step(step, torch.ones(5)).findings
    assert finding.count == 5 and "×5" in finding.text()


def test_harmless_ops_are_not_reported():
    def step(x):
        y = torch.where(x > 0, x, 0.0).masked_fill(x > 2, 1.0)
        y = y[torch.arange(2)] + torch.zeros(2, 3) + torch.full((), 2.0)
        y = nn.functional.scaled_dot_product_attention(*[y[None, None]] * 3)
        return y.topk(1).values.cumsum(-1).to(torch.float64)

    assert check_step(step, torch.ones(3, 3)).ok


def test_lazy_state_made_in_the_warm_up_does_not_count():
    state = {}

    def step(x):
        if not state:
            state["rate"] = torch.tensor(0.1)
        return x * state["rate"]

    assert not check_step(step, torch.ones(2), warmup=0).ok
    assert check_step(step, torch.ones(2)).ok
