"""Optimisers: torch's trajectories, masters, refused steps, sharing of state between executors, groups by
name."""

import sys
import types

import pytest
import torch
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.runtime.optim import NAMES, Group, Hyper, build_optimizer
from vlaforge.runtime.params import build_groups, freeze, frozen_names, module_names, parameter_names

HYPER = Hyper(beta1=0.9, beta2=0.95, eps=1e-8)
OK, NO = torch.tensor(True), torch.tensor(False)
ONE = torch.tensor(1.0)


class Net(nn.Module):
    """Two towers, a norm and a head; the head's second layer gets no gradient before `late` is set."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vision = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8))
        self.language = nn.ModuleDict({"q_proj": nn.Linear(8, 8, bias=False), "v_proj": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)
        self.late = False

    def towers(self):
        return {"eyes": ["vision"], "words": ["language"]}

    def forward(self, x):
        h = self.vision(x)
        h = torch.tanh(self.language["q_proj"](h)) + self.language["v_proj"](h)
        return self.head(h) + (self.spare(h) if self.late else 0.0)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)


def backward(net, step):
    x, y = batch(step)
    (net(x.to(net.head.weight.dtype)) - y).square().mean().backward()


def groups_of(net, lr=1e-2, decay=0.1):
    return [Group("base", lr, 0.0, decay, dict(net.named_parameters()))]


def run(net, optimizer, lr, steps, first=0):
    for step in range(first, first + steps):
        net.late = step >= 3
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step(torch.tensor([lr], dtype=torch.float64), ONE, OK)


TORCH = {
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "TorchFusedAdamW": lambda p, lr: torch.optim.AdamW(
        p, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    ),
    "ForgeAdamW": lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "SGD": lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.1),
}


@pytest.mark.parametrize("name", sorted(TORCH))
def test_trajectory_is_torchs(name):
    """Twelve steps, one layer joining at the fourth: each parameter counts its own updates, as torch's do."""
    ours, theirs = Net(), Net()
    optimizer = build_optimizer(name, groups_of(ours), HYPER)
    reference = TORCH[name](theirs.parameters(), 1e-2)
    run(ours, optimizer, 1e-2, 12)
    for step in range(12):
        theirs.late = step >= 3
        reference.zero_grad()
        backward(theirs, step)
        reference.step()
    for (key, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, msg=f"{name} {key}")


def test_fused_is_torchs_fused_bit_for_bit():
    ours, theirs = Net(), Net()
    run(ours, build_optimizer("TorchFusedAdamW", groups_of(ours), HYPER), 1e-2, 3)
    reference = TORCH["TorchFusedAdamW"](theirs.parameters(), 1e-2)
    for step in range(3):
        reference.zero_grad()
        backward(theirs, step)
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))


def test_sgd_with_momentum_is_torchs():
    ours, theirs = Net(), Net()
    run(ours, build_optimizer("SGD", groups_of(ours), Hyper(momentum=0.9)), 1e-2, 3)
    reference = torch.optim.SGD(theirs.parameters(), 1e-2, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        reference.zero_grad()
        backward(theirs, step)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(TORCH))
def test_refused_step_changes_nothing(name):
    net = Net()
    optimizer = build_optimizer(name, groups_of(net), HYPER)
    run(net, optimizer, 1e-2, 3)
    before = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    weights = [p.detach().clone() for p in net.parameters()]
    backward(net, 9)
    for param in net.parameters():
        if param.grad is not None:
            param.grad[..., 0] = float("nan")
    optimizer.step(torch.tensor([1e-2]), torch.tensor(float("nan")), NO)
    after = optimizer.state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))


@pytest.mark.parametrize("name", ["AdamW", "TorchFusedAdamW", "ForgeAdamW"])
def test_scale_multiplies_the_gradients(name):
    halved, plain = Net(), Net()
    for net, factor in ((halved, 0.5), (plain, 1.0)):
        optimizer = build_optimizer(name, groups_of(net), HYPER)
        for step in range(3):
            optimizer.zero_grad()
            backward(net, step)
            if net is plain:
                for param in net.parameters():
                    param.grad = None if param.grad is None else param.grad * 0.5
            optimizer.step(torch.tensor([1e-2]), torch.tensor(factor), OK)
    for a, b in zip(halved.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["AdamW", "TorchFusedAdamW", "ForgeAdamW"])
def test_masters_keep_updates_that_bf16_would_lose(name):
    """At a rate of 1e-5 the bf16 weights alone stand still; with masters they follow the fp32 run."""
    exact, kept, lossy = Net(), Net(), Net()
    rate = 1e-5
    for net in (kept, lossy):
        for param in net.parameters():
            param._master_fp32 = param.data.clone()
            param.data = param.data.to(torch.bfloat16)
    start = [p.detach().clone() for p in lossy.parameters()]
    optimizers = {
        id(net): build_optimizer(name, groups_of(net, decay=0.0), HYPER, master_weights=net is kept)
        for net in (exact, kept, lossy)
    }
    assert not any(hasattr(param, "_master_fp32") for param in kept.parameters())
    for step in range(8):
        backward(exact, step)
        for net in (exact, kept, lossy):
            for param, source in zip(net.parameters(), exact.parameters()):
                param.grad = None if source.grad is None else source.grad.to(param.dtype)
            optimizers[id(net)].step(torch.tensor([rate]), ONE, OK)
        optimizers[id(exact)].zero_grad()
    masters = {leaf.name: leaf.master for leaf in optimizers[id(kept)].leaves}
    for key, param in exact.named_parameters():
        # the same fp32 path up to the rounding of its gradients to bf16
        torch.testing.assert_close(masters[key], param.data, rtol=0, atol=2 * rate)
        assert torch.equal(kept.get_parameter(key).data, masters[key].to(torch.bfloat16))
    weight = start[[k for k, _ in lossy.named_parameters()].index("head.weight")]
    still = (lossy.head.weight == weight).float().mean()
    assert still > 0.9


@pytest.mark.parametrize("first, second", [("AdamW", "ForgeAdamW"), ("TorchFusedAdamW", "AdamW")])
def test_state_moves_between_executors_and_processes(first, second):
    whole, parted = Net(), Net()
    run(whole, build_optimizer("AdamW", groups_of(whole), HYPER), 1e-2, 8)
    optimizer = build_optimizer(first, groups_of(parted), HYPER)
    run(parted, optimizer, 1e-2, 5)
    saved = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    assert saved["step.head.weight"] == 5 and saved["step.spare.weight"] == 2
    resumed = build_optimizer(second, groups_of(parted), HYPER)
    resumed.load_state(saved)
    run(parted, resumed, 1e-2, 3, first=5)
    for a, b in zip(whole.parameters(), parted.parameters()):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-7)


def test_state_loads_strictly():
    net = Net()
    optimizer = build_optimizer("AdamW", groups_of(net), HYPER)
    run(net, optimizer, 1e-2, 2)
    saved = dict(optimizer.state_tensors())
    lacking = {key: value for key, value in saved.items() if key != "exp_avg.head.weight"}
    with pytest.raises(UserError, match=r"lacks exp_avg\.head\.weight"):
        build_optimizer("AdamW", groups_of(Net()), HYPER).load_state(lacking)
    with pytest.raises(UserError, match=r"1 parameters that do not train here \(old\.weight\)"):
        build_optimizer("AdamW", groups_of(Net()), HYPER).load_state(saved | {"exp_avg.old.weight": torch.zeros(1)})


# ------------------------------------------------------------------------------------------ libraries


@pytest.mark.parametrize("name, hint", [("TEFusedAdamW", "transformer-engine"), ("ApexFusedAdamW", "NVIDIA/apex")])
def test_absent_library_says_how_to_install_it(name, hint):
    with pytest.raises(UserError, match=hint) as caught:
        build_optimizer(name, groups_of(Net()))
    assert "pip install apex" not in str(caught.value)


def test_external_kernels_get_their_documented_arguments(monkeypatch):
    """A stand-in with the libraries' signature checks order and types; it computes torch's AdamW."""
    from vlaforge.runtime.optim.external import TRANSFORMER_ENGINE, ExternalAdam

    def adam(chunk, noop, lists, lr, beta1, beta2, eps, step, mode, bias_correction, decay, inv_scale):
        grads, params, first, second = lists
        assert noop.dtype == step.dtype == torch.int32 and lr.dtype == inv_scale.dtype == torch.float32
        assert (mode, bias_correction) == (1, 1) and chunk > 0
        torch._fused_adamw_(
            params, [g.clone() for g in grads], first, second, [], [step.float()] * len(grads), lr=lr,
            beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
            grad_scale=1 / inv_scale, found_inf=noop.float(),
        )  # fmt: skip

    module = types.ModuleType("transformer_engine_torch")
    module.multi_tensor_adam_capturable = adam
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", module)
    ours, theirs = Net(), Net()
    optimizer = build_optimizer("TEFusedAdamW", groups_of(ours), HYPER)
    with pytest.raises(UserError, match="needs CUDA"):
        run(ours, optimizer, 1e-2, 1)
    external = ExternalAdam(TRANSFORMER_ENGINE, "TEFusedAdamW")
    monkeypatch.setattr(external, "check", lambda device: None)
    optimizer = build_optimizer("TorchFusedAdamW", groups_of(ours), HYPER)
    optimizer.executor = external
    run(ours, optimizer, 1e-2, 3)
    run(theirs, build_optimizer("TorchFusedAdamW", groups_of(theirs), HYPER), 1e-2, 3)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("kernel", ["multi-tensor", "native"])
def test_one_pass_kernels_are_driven_right(monkeypatch, low, kernel):
    """The same trajectory, masters, rounding and average as with torch's fused kernel. The multi-tensor kernel's
    reference stands in for it here."""
    from vlaforge.runtime.ema import Ema
    from vlaforge.runtime.optim import forge

    if kernel == "native" and forge.native() is None:
        pytest.skip("no C compiler")
    nets, averages = (Net(), Net()), []
    for net, fast in zip(nets, (False, True)):
        monkeypatch.setattr(forge.ForgeAdam, "devices", ("cpu",) if fast and kernel == "multi-tensor" else ("cuda",))
        if not fast:
            monkeypatch.setattr(forge, "native", lambda: None)
        elif kernel == "native":
            monkeypatch.undo()
            monkeypatch.setattr(forge.TorchFusedAdam, "__call__", lambda *_: pytest.fail("not the native loop"))
        for param in net.parameters() if low else ():
            param._master_fp32 = param.data.clone()
            param.data = param.data.to(torch.bfloat16)
        optimizer = build_optimizer("ForgeAdamW", groups_of(net), HYPER)
        averages.append(Ema(optimizer, 0.9))
        run(net, optimizer, 1e-2, 6)
        backward(net, 7)
        optimizer.step(torch.tensor([1e-2]), torch.tensor(float("nan")), NO)
        squares = optimizer.square_sums([leaf for leaf in optimizer.leaves if leaf.name == "head.weight"])
        torch.testing.assert_close(squares[0], net.head.weight.grad.float().square().sum())
    close = {"rtol": 1e-2, "atol": 1e-2} if low else {"rtol": 2e-6, "atol": 1e-7}
    for name, param in nets[0].named_parameters():
        torch.testing.assert_close(nets[1].get_parameter(name), param, **close)
        torch.testing.assert_close(averages[1].tensors()[name], averages[0].tensors()[name], **close)


def test_layouts_and_dtypes_that_the_native_loop_does_not_take(caplog):
    """A gradient laid out otherwise is brought into line; fp16 and weights without masters go to torch's kernel."""
    ours, theirs = Net(), Net()
    optimizers = [
        build_optimizer(name, groups_of(net), HYPER) for name, net in (("ForgeAdamW", ours), ("AdamW", theirs))
    ]
    for net, optimizer in zip((ours, theirs), optimizers):
        backward(net, 0)
        grad = net.head.weight.grad
        net.head.weight.grad = torch.empty_like(grad.T, memory_format=torch.contiguous_format).copy_(grad.T).T
        optimizer.step(torch.tensor([1e-2], dtype=torch.float64), ONE, OK)
    torch.testing.assert_close(ours.head.weight, theirs.head.weight, rtol=2e-6, atol=1e-7)
    for dtype, masters in ((torch.float16, True), (torch.bfloat16, False)):
        net = Net().to(dtype)
        optimizer = build_optimizer("ForgeAdamW", groups_of(net), HYPER, master_weights=masters)
        before = net.head.weight.detach().clone()
        run(net, optimizer, 1e-2, 2)
        assert not torch.equal(net.head.weight, before)


def test_unknown_optimiser_names_the_nearest():
    with pytest.raises(UserError, match="TorchFusedAdamW"):
        build_optimizer("TorchFuseAdamW", groups_of(Net()))
    assert {"AdamW", "TorchFusedAdamW", "TEFusedAdamW", "ApexFusedAdamW", "Adam", "SGD"} <= set(NAMES)


# ------------------------------------------------------------------------------------------ names


def test_selectors_are_paths_towers_and_patterns():
    net = Net()
    assert parameter_names(net, "vision.0", "x") == ["vision.0.weight", "vision.0.bias"]
    assert parameter_names(net, "head.bias", "x") == ["head.bias"]
    assert parameter_names(net, "words", "x") == [
        "language.q_proj.weight",
        "language.v_proj.weight",
        "language.v_proj.bias",
    ]
    assert parameter_names(net, "*.?_proj", "x") == parameter_names(net, "language", "x")
    assert module_names(net, "q_proj", "x") == ["language.q_proj"]
    with pytest.raises(UserError, match=r"--freeze-modules: 'visoin' matches no parameter.*vision"):
        parameter_names(net, "visoin", "--freeze-modules")
    with pytest.raises(UserError, match="matches no parameter"):
        parameter_names(net, "head.bia", "--freeze-modules")  # a prefix of a name is not a path


def test_freezing():
    net = Net()
    names = frozen_names(net, "eyes, head.bias")
    freeze(net, names)
    still = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert still == {"vision.0.weight", "vision.0.bias", "vision.1.weight", "vision.1.bias", "head.bias"}
    groups = build_groups(net, lr=1.0, floor=0.1, weight_decay=0.0)
    assert still.isdisjoint(groups[0].params)
    freeze(net, [name for name, _ in net.named_parameters()])
    with pytest.raises(UserError, match="Nothing to train"):
        build_optimizer("AdamW", build_groups(net, lr=1.0, floor=0.1, weight_decay=0.0))


def test_groups_are_ordered_and_keep_their_floors():
    net = Net()
    rules = "language.q_proj=1e-3:5e-5,language=1e-7,eyes=1e-4"
    groups = build_groups(net, lr=1e-2, floor=1e-6, weight_decay=0.1, lr_group=rules)
    assert [(g.name, g.lr, g.floor) for g in groups] == [
        ("language.q_proj", 1e-3, 5e-5),
        ("language", 1e-7, 1e-7),
        ("eyes", 1e-4, 1e-6),
        ("base", 1e-2, 1e-6),
    ]
    assert set(groups[1].params) == {"language.v_proj.weight", "language.v_proj.bias"}
    assert sum(len(g.params) for g in groups) == len(list(net.parameters()))
    with pytest.raises(UserError, match="a submodule must stand before its parent"):
        build_groups(net, lr=1.0, floor=0.0, weight_decay=0.0, lr_group="language=1e-3,language.q_proj=1e-4")
    with pytest.raises(UserError, match=r"'langauge' matches no parameter.*language"):
        build_groups(net, lr=1.0, floor=0.0, weight_decay=0.0, lr_group="langauge=1e-3")
    with pytest.raises(UserError, match="must read path=lr"):
        build_groups(net, lr=1.0, floor=0.0, weight_decay=0.0, lr_group="language:1e-3")


def test_biases_and_norms_need_not_decay():
    net = Net()
    groups = build_groups(net, lr=1.0, floor=0.0, weight_decay=0.1, lr_group="eyes=0.5", decay_grouping="bias_norm")
    decay = {name: group.weight_decay for group in groups for name in group.params}
    assert [g.name for g in groups] == ["eyes", "eyes.no_decay", "base", "base.no_decay"]
    assert {name for name, value in decay.items() if value == 0.0} == {
        "vision.0.bias",
        "vision.1.weight",
        "vision.1.bias",
        "language.v_proj.bias",
        "head.bias",
        "spare.bias",
    }
