"""What is known of a run before a model has values: whether it can run, and what it holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Contract, Field
from vlaforge.graphs.cost import step_cost
from vlaforge.graphs.packing import split
from vlaforge.graphs.rows import cut_tables
from vlaforge.runtime.assemble import build_model, build_plan
from vlaforge.runtime.config import resolve
from vlaforge.runtime.memory import check_memory
from vlaforge.runtime.params import build_groups_of
from vlaforge.runtime.preflight import check_forward, on_paper
from vlaforge.runtime.setup import build_setup
from vlaforge.runtime.valueless import NeedsValues, valueless

ASKS = {
    "a number": lambda x: float(x.sum()),
    "a truth": lambda x: bool(x.any()),
    "a list": lambda x: x.tolist(),
    "an array": np.asarray,
    "the host": lambda x: x.cpu(),
    "beside the host": lambda x: x + torch.zeros(3, device="cpu"),
    "equality": lambda x: torch.equal(x, x),
    "a mask as index": lambda x: x[x > 0],
    "repeats": lambda x: torch.repeat_interleave(x.long()),
    "no formula": lambda x: x.unique(),
}
FAULTS = {
    "a product": lambda x: x @ torch.zeros(4),
    "a view": lambda x: x.view(7),
    "an index": lambda x: x[torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)],
    "not built": lambda x: (_ for _ in ()).throw(NotImplementedError("a meta analysis")),
}


class Net(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def frozen_networks(self, device):
        return {}

    def forward(self, batch, draw):
        return self.call(batch["x"][0])


CONTRACT = Contract({"x": Field((3,), torch.float32, "X")}, {})


@pytest.mark.parametrize("what", ASKS)
def test_what_asks_for_values_is_not_known(what):
    with pytest.raises(NeedsValues), valueless():
        ASKS[what](torch.empty(3))
    check_forward(Net(ASKS[what]), CONTRACT)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_a_fault_whatever_its_words(what):
    with pytest.raises(UserError, match=r"model\.\* cannot compute a loss"):
        check_forward(Net(FAULTS[what]), CONTRACT)


def test_values_of_the_host_can_be_read():
    with valueless():
        assert torch.ones(3, device="cpu").sum().item() == 3 and torch.ones(2, device="cpu").numpy().shape == (2,)


def setup_of(tmp_path, *flags):
    argv = ["--model", "groot_n1_7", "--preset", "tiny", "--device", "cpu", "--output-dir", str(tmp_path), *flags]
    return build_setup(resolve(argv))


LORA = ("--use-lora", "--lora-r", "4", "--lora-modules-to-save", "head.action_encoder")


@pytest.mark.parametrize(
    "flags",
    [(), ("--without", "embodiments"), ("--dtype", "bfloat16"), ("--freeze-modules", "backbone"), LORA],
    ids=["rows", "whole", "bf16", "frozen", "lora"],
)
def test_the_estimate_counts_what_the_run_holds(tmp_path, flags):
    """Weights, masters and moments of the model that trains under the plan, to the byte."""
    setup = setup_of(tmp_path, *flags)
    memory = step_cost(on_paper(setup)[0], setup.contract, on_paper(setup)[1])[0].memory
    model = build_model(setup, None, lambda text: None)
    plan = build_plan(setup, model, build_groups_of(setup.args, model))
    plan.lower(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    beside = sum(rows.rest.nbytes for rows in cut_tables(model).values())
    assert bool(beside) == plan.on("embodiments") == ("--without" not in flags)
    assert memory.weights == sum(p.nbytes for p in model.parameters()) + beside
    assert memory.gradients == sum(p.nbytes for p in trained)
    assert memory.masters == sum(p._master_fp32.nbytes for p in trained if hasattr(p, "_master_fp32"))
    assert memory.optimizer == 2 * 4 * sum(p.numel() for p in trained)
    whole = split(model, {name: p for name, p in model.named_parameters() if p.requires_grad})
    assert (sum(p.numel() for p in whole.values()) > sum(p.numel() for p in trained)) == bool(beside)


def test_a_run_that_fits_for_its_rows_alone_is_let_through(tmp_path, monkeypatch):
    """Room for what trains, and none for moments and gradients of whole tables."""
    setup = setup_of(tmp_path)
    model, options = on_paper(setup)
    memory = step_cost(model, setup.contract, options)[0].memory
    room = memory.weights + memory.gradients + memory.optimizer + 2**20
    monkeypatch.setattr("vlaforge.runtime.memory.available", lambda options: room)
    check_memory(setup.args, model, setup.contract, options)
    with pytest.raises(UserError, match="The run cannot fit"):
        check_memory(setup.args, model, setup.contract, replace(options, without=("embodiments",)))
