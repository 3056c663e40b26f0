"""Layouts: keys both ways, strictness, the account, and reading files."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.models.convert import Layout, Rule, detect, load_official, read_safetensors

LAYOUT = Layout(
    name="toy",
    prefix="net.",
    rules=(
        Rule("block.{i}.fc.{rest}", "layers.{i}.{rest}"),
        Rule("out_T", "head.weight", load=lambda t: t.T, save=lambda t: t.T),
        Rule("embed.weight", "embed.weight"),
        Rule("unused.weight", "extra.weight"),
    ),
    renames=(("old_out", "out_T"),),
    ties={"embed.weight": ("lm_head.weight",)},
    skips={"legacy.*": "belongs to an older model"},
    optional={"extra.weight": "nobody uses it"},
)
OTHER = Layout(name="other", rules=(Rule("w.{i}", "layers.{i}.weight"),))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 4, bias=False)
        self.embed = nn.Embedding(5, 3)


def official(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone().contiguous() for key, value in LAYOUT.save(model.state_dict()).items()}


def test_saving_writes_official_names_and_loading_reads_them_back():
    source, target = Toy(), Toy()
    state = official(source)
    assert set(state) == {"net.block.0.fc.weight", "net.block.0.fc.bias", "net.block.1.fc.weight",
                          "net.block.1.fc.bias", "net.out_T", "net.lm_head.weight"}  # fmt: skip
    assert torch.equal(state["net.out_T"], source.head.weight.T)
    account = load_official(target, {"toy": LAYOUT, "other": OTHER}, state)
    assert account.layout == "toy" and len(account.loaded) == 5
    assert account.tied == {"embed.weight": "net.lm_head.weight"}
    for key, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[key])


def test_prefix_is_optional_and_old_names_load():
    source = Toy()
    state = {key.removeprefix("net."): value for key, value in official(source).items()}
    state["old_out"] = state.pop("out_T")
    target = Toy()
    load_official(target, {"toy": LAYOUT}, state)
    assert torch.equal(source.head.weight, target.head.weight)


def test_the_account_names_what_was_not_read():
    source = Toy()
    state = official(source)
    state |= {"net.embed.weight": torch.ones(5, 3), "net.legacy.x": torch.ones(1), "net.unused.weight": torch.ones(1)}
    target = Toy()
    account = load_official(target, {"toy": LAYOUT}, state)
    assert target.embed.weight.eq(1).all()  # its own entry wins over the tied one
    assert set(account.unused) == {"net.lm_head.weight", "net.legacy.x", "net.unused.weight"}
    assert "older model" in account.text() and "6 loaded, 0 tied" in account.text()


def test_every_fault_is_listed_at_once():
    state = official(Toy())
    del state["net.block.1.fc.bias"]
    state["net.block.9.other"] = torch.ones(1)
    state["net.out_T"] = torch.ones(2, 2)
    with pytest.raises(UserError) as error:
        load_official(Toy(), {"toy": LAYOUT}, state)
    text = str(error.value)
    assert "1 missing (net.block.1.fc.bias)" in text and "1 unexpected (net.block.9.other)" in text
    assert "head.weight (2, 2) instead of (4, 3)" in text


def test_new_parameters_are_asked_for_by_name():
    state = official(Toy())
    del state["net.out_T"]
    target = Toy()
    fresh = target.head.weight.clone()
    account = load_official(target, {"toy": LAYOUT}, state, new=["head"])
    assert account.new == ["head.weight"] and torch.equal(target.head.weight, fresh)
    with pytest.raises(UserError, match=r"did you mean 'head\.weight'"):
        load_official(target, {"toy": LAYOUT}, state, new=["haed.weight"])


def test_unknown_layouts():
    with pytest.raises(UserError, match="None of the checkpoint's 1 keys"):
        detect({"toy": LAYOUT, "other": OTHER}, ["a.b"])
    with pytest.raises(UserError, match="did you mean 'toy'"):
        load_official(Toy(), {"toy": LAYOUT}, {}, layout="tyo")
    with pytest.raises(KeyError, match="no rule"):
        LAYOUT.save({"something.else": torch.ones(1)})


def test_reading_files_folders_and_shards(tmp_path):
    a, b = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    save_file(a, tmp_path / "model.safetensors")
    assert set(read_safetensors(tmp_path)) == set(read_safetensors(tmp_path / "model.safetensors")) == {"a"}
    shards = tmp_path / "shards"
    shards.mkdir()
    save_file(a, shards / "model-1.safetensors")
    save_file(b, shards / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_safetensors(shards)) == {"a", "b"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors here")
    for path, message in (("nothing", "does not exist"), ("empty", "folder without"), ("broken.safetensors", "read")):
        with pytest.raises(UserError, match=message):
            read_safetensors(tmp_path / path)
