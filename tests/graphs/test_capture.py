"""Capture and overlap: what can be held without a GPU, and (marked) what needs one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vlaforge.data.schema import Batch, Draw, Minibatch
from vlaforge.graphs import StepParts, make_plan
from vlaforge.graphs.capture import MAX_GRAPHS, CapturedStep, shape_key
from vlaforge.graphs.options import PlanOptions
from vlaforge.graphs.overlap import Prefetcher
from vlaforge.models.base import EmbodiedModel

CPU = torch.device("cpu")


def minibatch(rows, value=1.0, offset=0):
    return Minibatch(Batch(x=torch.full((rows, 2), value)), Draw(noise=torch.zeros(rows)), torch.arange(rows) + offset)


class Recorder:
    """A step that keeps what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, minibatches):
        self.seen.append([m.batch["x"] for m in minibatches])
        return {"sum": sum(m.batch["x"].sum() for m in minibatches)}


def test_inputs_are_copied_into_buffers_that_stay():
    step = Recorder()
    captured = CapturedStep(step, CPU)
    results = [float(captured([minibatch(3, value)])["sum"]) for value in (1.0, 2.0, 5.0)]
    assert results == [6.0, 12.0, 30.0]
    pointers = {batches[0].data_ptr() for batches in step.seen}
    assert len(pointers) == 1 and captured.counts.eager == 3


def test_a_shape_has_buffers_of_its_own():
    step = Recorder()
    captured = CapturedStep(step, CPU)
    for rows in (3, 4, 3):
        captured([minibatch(rows)])
    captured([minibatch(3), minibatch(4)])
    assert len(captured.counts.shapes) == 3
    assert step.seen[0][0].data_ptr() == step.seen[2][0].data_ptr() != step.seen[1][0].data_ptr()
    assert shape_key([minibatch(3)]) != shape_key([replace(minibatch(3), batch=Batch(x=torch.ones(3, 2).double()))])


def test_the_oldest_shape_makes_room():
    captured = CapturedStep(Recorder(), CPU)
    for rows in range(1, MAX_GRAPHS + 3):
        captured([minibatch(rows)])
    assert captured.counts.dropped == 2


def test_captured_training_is_the_training(pi05, make_step):
    """The wrapped step gives bitwise the losses and weights of the bare one."""
    runs = []
    for wrap in (False, True):
        model = pi05.model()
        step, _ = make_step(model)
        driven = CapturedStep(step, CPU) if wrap else step
        losses = [float(driven([pi05.batch(seed)])["loss"]) for seed in range(4)]
        runs.append((losses, model))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1].parameters(), runs[1][1].parameters()))


class Loader:
    """Four batches and a cursor that says how many were taken."""

    def __init__(self):
        self.cursor = 0

    def __iter__(self):
        for number in range(4):
            self.cursor += 1
            yield minibatch(2, float(number), offset=number)


class Encoded(EmbodiedModel):
    """A frozen start that doubles its input, once."""

    def __init__(self):
        super().__init__(None)
        self.calls = 0

    def encode_frozen(self, batch):
        self.calls += 1
        assert not torch.is_grad_enabled()
        return Batch({**batch, "x": batch["x"] * 2})

    contract = loss = act = counts = blocks = None


Encoded.__abstractmethods__ = frozenset()


def test_prefetcher_takes_nothing_ahead_of_time():
    """The loader's cursor is the step's own at every batch, so a resumed run misses and repeats nothing."""
    loader = Loader()
    feed = Prefetcher(loader, CPU)
    for number, given in enumerate(feed):
        assert float(given.batch["x"][0, 0]) == number and feed.cursor == number + 1
        assert given.ids.tolist() == [number, number + 1]


def test_prefetcher_runs_the_frozen_start():
    model = Encoded()
    got = [float(m.batch["x"][0, 0]) for m in Prefetcher(Loader(), CPU, model, ["encode_frozen"])]
    assert got == [0.0, 2.0, 4.0, 6.0] and model.calls == 4
    assert [float(m.batch["x"][0, 0]) for m in Prefetcher(Loader(), CPU, model)] == [0.0, 1.0, 2.0, 3.0]


def test_the_frozen_start_is_found_by_what_it_does(pi05):
    """π0.5 encodes ahead when its vision tower is frozen, by flag or by hand, and not otherwise."""

    def ahead(model, **options):
        entry = make_plan(model, pi05.contract, PlanOptions(device="h200", **options)).entry("overlap")
        return any(site.what == "encoder" for site in entry.sites)

    model = pi05.model()
    vision = frozenset(name for name, _ in model.named_parameters() if name.startswith("vision."))
    assert not ahead(model) and ahead(model, frozen=vision)
    assert all(p.requires_grad for name, p in model.named_parameters() if name in vision)
    assert not ahead(model, frozen=vision, strategy="fsdp", world=2)
    model.vision.requires_grad_(False)
    assert ahead(model)
    plan = make_plan(model, pi05.contract, PlanOptions(device="h200", without=("overlap",)))
    assert "frozen encoders" in plan.entry("graph_step").reason


def test_reasons_not_to_capture(pi05):
    def reason(**options):
        return make_plan(pi05.model(), pi05.contract, PlanOptions(device="h200", **options)).entry("graph_step").reason

    assert "one graph a shape" in reason()
    assert "2 micro-batches in one graph" in reason(accumulate=2)
    assert "FSDP" in reason(strategy="fsdp", world=8)
    assert "reduction" in reason(strategy="ddp", world=8) and "micro-batches" in reason(
        strategy="ddp", world=8, accumulate=2
    )


@pytest.mark.gpu
def test_replayed_steps_train_like_eager_ones(pi05, make_step):
    """On a device: warm-up, recording and replays give the losses of the bare step."""
    runs = []
    for wrap in (False, True):
        model = pi05.model().cuda()
        step, _ = make_step(model)
        driven = CapturedStep(step, "cuda") if wrap else step
        losses = [float(driven([pi05.batch(seed).to("cuda")])["loss"]) for seed in range(8)]
        runs.append(losses)
        if wrap:
            assert driven.counts.replayed >= 4
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


@pytest.mark.gpu
def test_copies_ride_on_a_side_stream(pi05):
    model = pi05.model().cuda()
    plan = pi05.only(model, "overlap")
    parts = plan.lower_step(StepParts(model, None, [pi05.batch(0), pi05.batch(1)], None, torch.device("cuda")))
    arrived = [m.batch["images"].cpu() for m in parts.loader]
    assert all(torch.equal(a, pi05.batch(seed).batch["images"]) for seed, a in enumerate(arrived))
