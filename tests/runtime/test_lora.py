"""LoRA: zero at the start, peft's numbers and files both ways, merging, resume, and what does not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.runtime.adapter import CONFIG, Attached, adapter_tensors, load_adapter, read_config
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.checkpoint.files import Draft
from vlaforge.runtime.lora import LoraConfig, adapted, fingerprint, inject, merge

peft = pytest.importorskip("peft")


class Net(nn.Module):
    """An embedding, a convolution, attention-like projections and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.patch = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(6, 6), "v_proj": nn.Linear(6, 6, bias=False)}) for _ in range(2)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, tokens, image):
        h = self.embed(tokens).mean(1) + self.patch(image).mean((2, 3))
        for layer in self.layers:
            h = h + torch.tanh(layer["q_proj"](h)) * layer["v_proj"](h)
        return self.head(h)


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 11, (3, 5), generator=generator), torch.randn(3, 3, 8, 8, generator=generator)


TARGETS = ("q_proj", "layers.*.v_proj", "embed", "patch")
ALL = LoraConfig(r=3, alpha=5, targets=TARGETS, save=("head",), bias="lora_only", init="false")


def write(model, config, folder):
    paths = inject(model, config) if not adapted(model) else list(adapted(model))
    draft = Draft(folder, "adapter")
    formats.write(draft, "safetensors", {"adapter": adapter_tensors(model)})
    draft.text(CONFIG, Attached(config, tuple(paths), None, fingerprint(model)).to_json())
    return draft.commit({})


def test_nothing_changes_at_the_start():
    plain, lora = Net(), Net()
    names = set(plain.state_dict())
    paths = inject(lora, LoraConfig(r=2, targets=("layers",)))
    assert paths == ["layers.0.q_proj", "layers.0.v_proj", "layers.1.q_proj", "layers.1.v_proj"]
    assert torch.equal(plain(*inputs()), lora(*inputs()))
    assert set(lora.state_dict()) - names == {f"{p}.lora_{side}.weight" for p in paths for side in "AB"}
    assert {n for n, p in lora.named_parameters() if p.requires_grad} == set(lora.state_dict()) - names


@pytest.mark.parametrize("rslora", [False, True])
def test_file_gives_peft_the_same_model(tmp_path, rslora):
    """What we write, peft's own loader puts on the plain model; outputs are equal."""
    from dataclasses import replace

    config = replace(ALL, rslora=rslora)
    ours = Net()
    folder = write(ours, config, tmp_path)
    theirs = peft.PeftModel.from_pretrained(Net(), str(folder))
    torch.testing.assert_close(theirs(*inputs()), ours(*inputs()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(Net()(*inputs()), ours(*inputs()), atol=1e-2)


def test_pefts_file_gives_us_the_same_model(tmp_path):
    """And the reverse, with peft's own names of modules to save and biases."""
    theirs = peft.get_peft_model(
        Net(),
        peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "embed", "patch"], modules_to_save=["head"],
            bias="lora_only", init_lora_weights=False,
        ),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter, dtype=torch.float32))
            assert "lora_" not in name or parameter.requires_grad
    theirs.save_pretrained(str(tmp_path))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    ours = Net()
    config = read_config(tmp_path)
    inject(ours, config)
    assert load_adapter(ours, stored) == len(stored)
    torch.testing.assert_close(ours(*inputs()), theirs(*inputs()), rtol=1e-5, atol=1e-6)
    mine = adapter_tensors(ours)
    assert set(mine) == set(stored) and all(torch.equal(mine[k], stored[k]) for k in stored)


def test_merged_outputs_are_equal():
    model = Net()
    inject(model, ALL)
    before = model(*inputs())
    merge(model)
    torch.testing.assert_close(model(*inputs()), before, rtol=1e-5, atol=1e-5)
    assert set(model.state_dict()) == set(Net().state_dict()) and not adapted(model)
    assert type(model.head) is type(model.layers[0]["q_proj"]) is nn.Linear


def test_faults():
    model = Net()
    inject(model, LoraConfig(targets=("q_proj",)))
    with pytest.raises(UserError, match="has LoRA adapters already"):
        inject(model, LoraConfig(targets=("q_proj",)))
    with pytest.raises(UserError, match=r"--lora-target-modules: 'q_porj' matches no.*q_proj"):
        inject(Net(), LoraConfig(targets=("q_porj",)))
    with pytest.raises(UserError, match="--lora-modules-to-save"):
        inject(Net(), LoraConfig(targets=("q_proj",), save=("haed",)))
    stored = adapter_tensors(model)
    wrong = {k: v for k, v in stored.items() if "layers.1" not in k} | {
        "base_model.model.x.lora_A.weight": torch.ones(1)
    }
    with pytest.raises(UserError, match=r"2 missing \(layers\.1.*1 unexpected \(x\.lora_A"):
        load_adapter(model, wrong)
    other = Net()
    inject(other, LoraConfig(r=4, targets=("q_proj",)))
    with pytest.raises(UserError, match="4 of another shape"):
        load_adapter(other, stored)


# ------------------------------------------------------------------------------------------ runs

LORA = ["--use-lora", "--lora-r", "4", "--lora-modules-to-save", "action_out", "--lr-base", "1e-3"]


def test_resume_continues_the_same_adapter(runs):
    """Wrapped once, moments kept, base frozen: three and three steps are six, bit for bit."""
    whole = runs(*LORA)
    first = runs(*LORA, "--train-iters", "3", into="x")
    assert not list(first.checkpoint.glob("model.safetensors")) and (first.checkpoint / CONFIG).is_file()
    parted = runs(*LORA, "--resume", into="x")
    assert runs.losses(parted) == runs.losses(whole)
    ours, theirs = (load_file(t.checkpoint / "adapter_model.safetensors") for t in (whole, parted))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert sum("lora_" in name for name, _ in parted.model.named_parameters()) == 2 * len(adapted(parted.model))
    optim = formats.read(parted.checkpoint, "optim")
    assert all("lora_" in name or "action_out" in name for name in optim)
    assert any(float(v.abs().sum()) > 0 for k, v in optim.items() if k.startswith("exp_avg."))


def test_adapter_knows_its_base_and_is_no_base(runs):
    base = runs("--train-iters", "2")
    flags = ["--pretrained-checkpoint", str(base.folder)]
    trained = runs(*LORA, *flags, into="x")
    held = json.loads((trained.checkpoint / CONFIG).read_text())
    assert held["base_model_name_or_path"] == str(base.folder) and held["r"] == 4
    again = runs(*LORA, *flags, "--lora-adapter", str(trained.checkpoint), "--train-iters", "1", into="y")
    assert any(note.startswith("LoRA") and "from" in note for note in runs.hooks.notes)
    assert runs.rows(again)[0]["loss"] != runs.rows(trained)[0]["loss"]
    with pytest.raises(UserError, match="trained on another base"):
        runs(*LORA, "--lora-adapter", str(trained.checkpoint))
    with pytest.raises(UserError, match="is a LoRA adapter, not a model"):
        runs("--pretrained-checkpoint", str(trained.folder))
    with pytest.raises(UserError, match="is no LoRA adapter"):
        runs(*LORA, "--lora-adapter", str(base.checkpoint))
    with pytest.raises(UserError, match="is a LoRA adapter: add --use-lora"):
        runs("--resume", "--train-iters", "8", into="x")
    with pytest.raises(UserError, match="is a whole model: leave out --use-lora"):
        runs("--resume", "--train-iters", "8", "--use-lora", into="run1")


@pytest.mark.parametrize("format", ["pt", "dcp"])
def test_other_formats_hold_a_peft_file_too(runs, format):
    trained = runs(*LORA, "--save-format", format, "--train-iters", "2", into="x")
    assert (trained.checkpoint / "adapter_model.safetensors").is_file()
    assert runs(*LORA, "--save-format", format, "--train-iters", "3", "--resume", into="x").completed == 3


def test_dropout_and_low_precision(runs):
    flags = [*LORA, "--lora-dropout", "0.2", "--dtype", "bfloat16", "--lora-target-modules", "expert"]
    whole = runs(*flags, "--train-iters", "4")
    runs(*flags, "--train-iters", "2", into="x")
    parted = runs(*flags, "--train-iters", "4", "--resume", into="x")
    assert runs.losses(parted) == runs.losses(whole)


def test_adapted_modules_compile():
    """One graph, without a break, and the same gradients (the whole run is in the distributed matrix)."""
    model = Net()
    inject(model, ALL)
    eager = model(*inputs()).square().sum()
    eager.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*inputs()).square().sum()
    compiled.backward()
    torch.testing.assert_close(compiled, eager)
    for name, p in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(p.grad, grads[name])
