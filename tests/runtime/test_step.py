"""The step: one global mean whatever the split, guards that refuse whole steps, loss scaling, averages."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Batch, Contract, Draw, DrawSpec, Field, Minibatch
from vlaforge.graphs.check import check_step
from vlaforge.models.base import BlockGroup, EmbodiedModel, Losses, LossTerm
from vlaforge.runtime.ema import Ema
from vlaforge.runtime.guards import Guard, GuardConfig, LossScale
from vlaforge.runtime.optim import Hyper, build_optimizer
from vlaforge.runtime.params import build_groups
from vlaforge.runtime.programs import FinetuneTrainer
from vlaforge.runtime.ranks import Ranks
from vlaforge.runtime.schedules import Schedule
from vlaforge.runtime.step import Step

B, H, A = 8, 4, 3


@dataclass(frozen=True)
class Config:
    width: int = 16


class Flow(EmbodiedModel):
    """Two loss terms with masks of their own over a small net: what a family looks like to the step."""

    family = "flow"

    def __init__(self, config=None):
        super().__init__(config or Config())
        torch.manual_seed(0)
        self.inner = nn.Linear(A, self.config.width)
        self.outer = nn.Linear(self.config.width, A)
        self.spare = nn.Linear(2, 2)

    @classmethod
    def contract(cls, config):
        fields = {
            "actions": Field((H, A), torch.float32, "HA", -1.0, 1.0),
            "action_mask": Field((H, A), torch.bool, "HA"),
        }
        return Contract(fields, {"noise": DrawSpec((H, A))})

    def loss(self, batch, draw):
        out = self.outer(torch.tanh(self.inner(draw["noise"].to(self.inner.weight.dtype))))
        error = (out.float() - batch["actions"]).square()
        flow = torch.where(batch["action_mask"], error, 0.0)
        size = out.float().square().mean((1, 2))
        counts = self.counts(batch)
        return Losses({"flow": LossTerm(flow.sum(), counts["flow"]), "size": LossTerm(size.sum(), counts["size"], 0.1)})

    def counts(self, batch):
        mask = batch["action_mask"]
        ones = torch.ones_like(mask[:, 0, 0], dtype=torch.float32)
        return {"flow": mask.sum().float(), "size": ones.sum()}

    def act(self, obs, draw, steps):
        return draw["noise"]

    def blocks(self):
        return [BlockGroup("", ())]


def minibatch(seed, rows=B):
    generator = torch.Generator().manual_seed(seed)
    actions, noise = (torch.randn(rows, H, A, generator=generator) for _ in range(2))
    mask = torch.rand(rows, H, A, generator=generator) > 0.4
    return Minibatch(Batch(actions=actions, action_mask=mask), Draw(noise=noise), torch.arange(rows))


def parts_of(whole, sizes):
    parts, start = [], 0
    for size in sizes:
        cut = slice(start, start + size)
        parts.append(
            Minibatch(
                Batch({k: v[cut] for k, v in whole.batch.items()}),
                Draw({k: v[cut] for k, v in whole.draw.items()}),
                whole.ids[cut],
            )
        )
        start += size
    return parts


def make(model=None, name="AdamW", clip=1.0, config=None, scale=False, lr_group=None, ranks=None, lr=1e-2):
    model = model or Flow()
    groups = build_groups(model, lr=lr, floor=0.0, weight_decay=0.1, lr_group=lr_group)
    optimizer = build_optimizer(name, groups, Hyper())
    return Step(
        FinetuneTrainer(),
        model,
        model,
        optimizer,
        Schedule("constant_with_warmup", 2, 100),
        ranks=ranks or Ranks(),
        guard=Guard(config or GuardConfig(), "cpu"),
        loss_scale=LossScale(scale, "cpu", start=2.0**10, quiet=3),
        clip=clip,
    )


def weights(step):
    return {name: p.detach().clone() for name, p in step.bare.named_parameters()}


@pytest.mark.parametrize("sizes", [(4, 4), (1, 7), (2, 2, 2, 2), (5, 3)])
def test_accumulation_is_the_same_mean(sizes):
    """Micro-batches of any size give the whole batch's loss and gradients: sums over counts, not means of
    means."""
    whole, split = make(), make()
    for number in range(3):
        batch = minibatch(number)
        one = whole([batch])
        many = split(parts_of(batch, sizes))
        for name in ("loss", "loss/flow", "loss/size", "grad_norm"):
            torch.testing.assert_close(many[name], one[name], rtol=1e-6, atol=1e-7)
    for a, b in zip(weights(whole).values(), weights(split).values()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_masked_targets_change_nothing():
    clean, dirty = make(), make()
    batch, garbage = minibatch(0), minibatch(0)
    garbage.batch["actions"][~garbage.batch["action_mask"]] = 1e3
    first, second = clean([batch]), dirty([garbage])
    assert torch.equal(first["loss"], second["loss"])
    assert all(torch.equal(a, b) for a, b in zip(weights(clean).values(), weights(dirty).values()))


def test_loss_and_norm_are_those_of_plain_torch():
    step, model = make(clip=0.05), Flow()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(4):
        batch = minibatch(number)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, number / 2)
        optimizer.zero_grad()
        losses = model(batch.batch, batch.draw)
        loss = losses.total()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        metrics = step([batch])
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(metrics["grad_norm"], norm, rtol=1e-6, atol=0)
        assert float(metrics["lr"]) == pytest.approx(1e-2 * min(1.0, number / 2))
    for a, b in zip(model.parameters(), step.bare.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


class Halves(Ranks):
    """Two ranks run one after the other: the first pass records what it sends, the second adds it."""

    world = 2

    def __init__(self):
        self.mail, self.replay = [], None

    def sum(self, values):
        if self.replay is None:
            self.mail.append(values.clone())
            return values
        return values + self.replay.pop(0)


def test_counts_are_summed_over_ranks_before_the_forward():
    """A rank's loss is its own sum over everybody's count, so the sum over ranks is the global mean."""
    batch = minibatch(0)
    mine, other = parts_of(batch, (3, 5))
    whole = make()([batch])
    counts = {name: float(value) for name, value in Flow().counts(batch.batch).items()}
    ranks = Halves()
    step = make(ranks=ranks)
    step([other])
    ranks.replay = [ranks.mail[0], None]
    # what the other rank would send after its forward, with the true counts
    losses = Flow().loss(other.batch, other.draw).terms
    sent = [losses[name].weight * losses[name].sum.detach() / counts[name] for name in ("flow", "size")]
    ranks.replay[1] = torch.stack(sent)
    step = make(ranks=ranks)
    metrics = step([mine])
    torch.testing.assert_close(metrics["loss"], whole["loss"], rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------ guards


def poisoned(seed, value=float("nan")):
    batch = minibatch(seed)
    batch.batch["action_mask"][0, 0, 0] = True
    batch.batch["actions"][0, 0, 0] = value
    return batch


@pytest.mark.parametrize("name", ["AdamW", "TorchFusedAdamW", "ForgeAdamW", "SGD"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_a_bad_step_is_refused_whole_and_counted(name, value):
    """Weights, moments, average and update counts stay; the run goes on as if the batch had not been
    drawn."""
    guarded, clean = make(name=name), make(name=name)
    averages = [Ema(step.optimizer, 0.9) for step in (guarded, clean)]
    for number in range(3):
        guarded([minibatch(number)])
        clean([minibatch(number)])
    before, state = weights(guarded), {k: v.clone() for k, v in guarded.optimizer.state_tensors().items()}
    bad = guarded([minibatch(50), poisoned(3, value)])
    assert all(torch.equal(before[k], v) for k, v in weights(guarded).items())
    after = guarded.optimizer.state_tensors()
    assert all(torch.equal(state[k], after[k]) for k in state)
    kind = "spikes" if math.isfinite(value) else "nonfinite"
    assert int(bad["skipped"]) == int(bad[kind]) == int(bad["in_a_row"]) == 1
    clean.iteration.add_(1)
    good = guarded([minibatch(4)])
    clean([minibatch(4)])
    assert int(good["skipped"]) == 1 and int(good["in_a_row"]) == 0
    assert all(torch.equal(a, b) for a, b in zip(weights(guarded).values(), weights(clean).values()))
    for key, value in averages[0].tensors().items():
        assert torch.equal(value, averages[1].tensors()[key])


def test_guards_can_be_off():
    step = make(config=GuardConfig(spike_threshold=0.0, nonfinite=False))
    metrics = step([poisoned(0)])
    assert int(metrics["skipped"]) == 0 and not torch.isfinite(step.bare.outer.weight).all()
    assert int(make(config=GuardConfig(spike_threshold=None))([poisoned(0, 1e6)])["skipped"]) == 0


def test_many_refusals_in_a_row_stop_the_run():
    step = make(config=GuardConfig(stop_after=3))
    for number in range(3):
        assert step.guard.fault(step.guard.state(), number) is None
        step([poisoned(number)])
    message = step.guard.fault(step.guard.state(), 3)
    assert "last 3 steps up to step 3" in message and "--lr-base" in message
    step([minibatch(9)])
    assert step.guard.fault(step.guard.state(), 4) is None
    other = Guard(GuardConfig(), "cpu")
    other.load(step.guard.state())
    assert other.state() == step.guard.state() and other.state()["nonfinite"] == 3


def test_loss_scaling_changes_nothing_but_the_range():
    plain, scaled = make(), make(scale=True)
    for number in range(5):
        a, b = plain([minibatch(number)]), scaled([minibatch(number)])
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"], rtol=1e-6, atol=0)
    for a, b in zip(weights(plain).values(), weights(scaled).values()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    assert float(scaled.loss_scale.scale) == 2.0**11  # doubled once after three quiet steps


def test_overflow_halves_the_scale_and_skips():
    step = make(scale=True)
    step.loss_scale.scale.fill_(2.0**24)
    step.bare.outer.weight.register_hook(lambda grad: torch.where(step.loss_scale.scale > 2.0**22, grad * 1e38, grad))
    before = weights(step)
    for _ in range(2):
        metrics = step([minibatch(0)])
    assert all(torch.equal(before[k], v) for k, v in weights(step).items())
    assert int(metrics["overflows"]) == int(metrics["skipped"]) == 2
    assert int(metrics["in_a_row"]) == 0 and float(step.loss_scale.scale) == 2.0**22
    step([minibatch(0)])
    assert not torch.equal(before["outer.weight"], step.bare.outer.weight)
    other = LossScale(True, "cpu")
    other.load(step.loss_scale.state())
    assert other.state() == step.loss_scale.state()


# ------------------------------------------------------------------------------------------ the rest


def test_average_follows_the_weights():
    step = make(name="TorchFusedAdamW")
    ema = Ema(step.optimizer, 0.75)
    expected = weights(step)
    for number in range(4):
        step([minibatch(number)])
        now = weights(step)
        expected = {k: expected[k] + 0.25 * (now[k] - expected[k]) for k in expected}
    for key, value in ema.tensors().items():
        torch.testing.assert_close(value, expected[key])
    now = weights(step)
    with ema.swapped_in():
        assert torch.equal(step.bare.outer.weight, ema.tensors()["outer.weight"])
        assert not torch.equal(step.bare.outer.weight, now["outer.weight"])
    assert all(torch.equal(now[k], v) for k, v in weights(step).items())
    fresh = Ema(make().optimizer, 0.75)
    fresh.load(ema.tensors())
    assert torch.equal(fresh.tensors()["inner.bias"], ema.tensors()["inner.bias"])
    with pytest.raises(UserError, match=r"lacks 1 parameters, the first is inner\.bias"):
        fresh.load({k: v for k, v in ema.tensors().items() if k != "inner.bias"})
    with pytest.raises(UserError, match="--ema-decay"):
        Ema(make().optimizer, 1.0)


def test_metrics_by_group():
    step = make(lr_group="outer=1e-3")
    step([minibatch(0)])
    metrics = step([minibatch(1)])
    assert float(metrics["lr/outer"]) == pytest.approx(5e-4) and float(metrics["lr/base"]) == pytest.approx(5e-3)
    assert float(metrics["lr"]) == float(metrics["lr/base"])
    parts = metrics["grad_norm/outer"].square() + metrics["grad_norm/base"].square()
    torch.testing.assert_close(parts.sqrt(), metrics["grad_norm"])


@pytest.mark.parametrize("name", ["AdamW", "TorchFusedAdamW", "ForgeAdamW"])
@pytest.mark.parametrize("scale", [False, True])
def test_the_step_never_waits_for_the_device(name, scale):
    """Ready for a CUDA graph: no value is read by the host, nothing is made from host memory."""
    step = make(name=name, scale=scale, lr_group="outer=1e-3")
    Ema(step.optimizer, 0.9)
    report = check_step(step, [minibatch(0), minibatch(1)], warmup=2)
    assert report.ok, report.text()
