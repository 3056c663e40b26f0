"""Checkpoints: whole or absent, read back in every format, kept and pruned, loaded strictly, without pickle."""

import json
import os
import pickle
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vlaforge.data.errors import UserError
from vlaforge.models.convert import Layout, Rule
from vlaforge.runtime.checkpoint import files, formats
from vlaforge.runtime.checkpoint.rehearsal import rehearse
from vlaforge.runtime.checkpoint.store import Checkpoints, Content, snapshot
from vlaforge.runtime.checkpoint.tensors import TensorFiles, save
from vlaforge.runtime.checkpoint.weights import (
    canonical,
    checksum,
    find_weights,
    load_model,
    model_tensors,
    open_weights,
    own_layout,
)


def groups(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 4, generator=generator)
    model = {
        "a.weight": weight,
        "a.low": torch.randn(3, generator=generator).to(torch.bfloat16),
        "tied": weight,
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 2),
        "view": torch.arange(12.0).reshape(3, 4).t(),
    }
    steps = torch.tensor(5.0)
    optim = {"exp_avg.a.weight": weight * 2, "step.a.weight": steps, "step.a.low": steps}
    return {"model": model, "ema": {"a.weight": weight + 1}, "optim": optim}


def same(stored, wanted):
    assert set(stored) == set(wanted)
    for name, value in wanted.items():
        assert stored[name].dtype == value.dtype and torch.equal(stored[name], value), name


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_every_format_reads_back(tmp_path, format, background):
    live = groups()
    store = Checkpoints(tmp_path, format=format, background=background)
    store.save(Content(7, live, {"state.json": "{}"}, about={"model": "x"}))
    for group in live.values():  # training goes on while the background writes its copy
        for value in group.values():
            value.zero_()
    store.wait()
    step, path = store.newest()
    assert step == 7 and files.fault(path) is None and formats.format_of(path) == format
    for group, tensors in groups().items():
        same(formats.read(path, group), tensors)
    assert (tmp_path / "last").resolve() == path.resolve()
    assert files.manifest(path)["model"] == "x"


def test_background_save_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """The save returns while the writing is held up, and the next save waits for it."""
    gate = threading.Event()
    commit = files.Draft.commit

    def slow(self, about):
        assert gate.wait(20)
        return commit(self, about)

    monkeypatch.setattr(files.Draft, "commit", slow)
    store = Checkpoints(tmp_path, background=True)
    store.save(Content(1, groups()))
    assert store.newest() is None
    gate.set()
    store.save(Content(2, groups()))
    store.wait()
    assert [step for step, _ in store.listed()] == [1, 2]


def test_no_memory_for_a_copy_saves_in_the_foreground(tmp_path, monkeypatch):
    from vlaforge.runtime.checkpoint import store as module

    notes = []
    monkeypatch.setattr(module, "free_memory", lambda: 100)
    store = Checkpoints(tmp_path, background=True, note=notes.append)
    store.save(Content(1, groups()))
    assert not store.writing and store.newest()[0] == 1 and "written in the foreground" in notes[0]


def test_snapshot_is_a_copy_and_keeps_ties():
    live = groups()
    copy = snapshot(live)
    live["model"]["a.weight"].zero_()
    same(copy["model"], groups()["model"])
    kept = {}
    first = snapshot(groups(0), kept)["model"]["a.low"]
    again = snapshot(groups(1), kept)["model"]
    same(again, groups(1)["model"])
    assert again["a.low"] is first  # the memory of the last copy serves the next
    assert copy["model"]["tied"].data_ptr() == copy["model"]["a.weight"].data_ptr()


# ------------------------------------------------------------------------------------------ safetensors


def test_our_files_are_ordinary_safetensors(tmp_path):
    draft = files.Draft(tmp_path, "x")
    save(draft, "model", groups()["model"])
    path = draft.commit({})
    theirs = load_file(path / "model.safetensors")
    wanted = groups()["model"]
    assert set(theirs) == set(wanted) - {"tied"}  # one copy of shared memory, the other name in the metadata
    assert all(torch.equal(theirs[name], wanted[name]) for name in theirs)
    same(TensorFiles(path), wanted)


def test_shards_and_index(tmp_path):
    tensors = {f"layer.{n}": torch.full((10,), float(n)) for n in range(7)}
    draft = files.Draft(tmp_path, "x")
    save(draft, "model", tensors, shard_bytes=100)
    path = draft.commit({})
    names = sorted(entry for entry in os.listdir(path) if entry.endswith(".safetensors"))
    assert names == [f"model-{n:05d}-of-00004.safetensors" for n in range(1, 5)]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 280 and set(index["weight_map"]) == set(tensors)
    same(formats.read(path, "model"), tensors)
    same(TensorFiles(path / "model.safetensors.index.json"), tensors)
    (path / names[1]).unlink()
    with pytest.raises(UserError, match=names[1]):
        TensorFiles(path)


def test_no_pickle_runs(tmp_path):
    """A .pt with code in it and a DCP table of contents with code in it are refused, and the code does not run."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"a": torch.zeros(1), "b": Bomb()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="more than tensors"):
        formats.load_pt(tmp_path / "x.pt")
    store = Checkpoints(tmp_path / "run", format="dcp")
    store.save(Content(1, groups()))
    with open(store.newest()[1] / "dcp" / ".metadata", "wb") as file:
        pickle.dump(Bomb(), file)
    with pytest.raises(UserError, match="cannot be read safely"):
        formats.read(store.folder / "steps_1", "model")
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------ whole or absent


def test_broken_newest_falls_back_with_a_warning(tmp_path):
    notes = []
    store = Checkpoints(tmp_path, note=notes.append)
    for step in (1, 2, 3, 4, 5):
        store.save(Content(step, groups(step), {"state.json": "{}"}))
    with open(tmp_path / "steps_5" / "model.safetensors", "r+b") as file:  # one bit of one weight
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))
    (tmp_path / "steps_4" / "manifest.json").write_text('{"format": 1, "files"')
    with open(tmp_path / "steps_3" / "model.safetensors", "a") as file:
        file.truncate(100)
    (tmp_path / "steps_2" / "state.json").unlink()
    notes.clear()
    assert store.newest()[0] == 1
    text = "\n".join(notes)
    for words in ("not what was written", "cannot be read", "100 bytes instead of", "state.json is missing"):
        assert words in text
    assert files.fault(tmp_path / "nowhere") == "it has no manifest.json"


def overwrite(path, at, length=64):
    """Other bytes in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\7" * length)


def place(folder, name):
    """(file, first byte, length) of a tensor in a DCP folder."""
    entries = formats.SafeReader(folder).read_metadata().storage_data
    part = next(part for index, part in entries.items() if index.fqn == name)
    return part.relative_path, part.offset, part.length


def test_a_broken_optimiser_state_in_dcp_falls_back_with_a_warning(tmp_path):
    """As in every format: whatever file it is in, and however it is damaged."""
    notes = []
    store = Checkpoints(tmp_path, format="dcp", note=notes.append)
    for step in (1, 2, 3, 4):
        store.save(Content(step, groups(step)))
    shard, at, length = place(tmp_path / "steps_4/dcp", "optim.exp_avg.a.weight")
    overwrite(tmp_path / "steps_4/dcp" / shard, at + length // 2, 1)
    (tmp_path / "steps_3/dcp" / shard).unlink()
    (tmp_path / "steps_2/dcp/.metadata").unlink()
    notes.clear()
    assert store.newest()[0] == 1
    for words in (f"the content of dcp/{shard} is not what", f"dcp/{shard} is missing", "dcp/.metadata is missing"):
        assert words in "\n".join(notes)
    same(formats.read(store.newest()[1], "optim"), groups(1)["optim"])


def test_a_dcp_folder_of_others_names_its_damage(tmp_path):
    """Without a manifest to compare with: a missing and a short file at once, nonsense where it is read."""
    draft = files.Draft(tmp_path, "x")
    formats.write(draft, "dcp", groups())
    path = draft.commit({})
    (path / "manifest.json").unlink()
    shard, at, length = place(path / "dcp", "optim.exp_avg.a.weight")
    whole = (path / "dcp" / shard).read_bytes()
    optim = formats.read(path, "optim")
    assert optim.shape("exp_avg.a.weight") == (6, 4)
    overwrite(path / "dcp" / shard, at, length)
    with pytest.raises(UserError, match="dcp' is broken: the tensors of 'optim' in it are damaged"):
        optim["exp_avg.a.weight"]
    (path / "dcp" / shard).write_bytes(whole[:-5])
    for group in groups():
        with pytest.raises(UserError, match=rf"{shard} has {len(whole) - 5} bytes instead of {len(whole)}\."):
            formats.read(path, group)
    (path / "dcp" / shard).unlink()
    with pytest.raises(UserError, match=f"is broken: {shard} is missing"):
        open_weights(path)


def test_half_written_folders_are_never_seen_and_swept(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(Content(1, groups()))
    draft = files.Draft(tmp_path, "steps_2")
    save(draft, "model", groups()["model"])
    assert [step for step, _ in store.listed()] == [1]
    os.rename(tmp_path / "steps_1", tmp_path / ".removing-steps_1")  # died while replacing it
    store.sweep()
    assert [step for step, _ in store.listed()] == [1] and store.newest()[0] == 1
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_leaves_the_last_one_whole(tmp_path, monkeypatch, background):
    store = Checkpoints(tmp_path, background=background)
    store.save(Content(1, groups()))
    store.wait()
    written = files.Sink.write

    def full(self, data):
        if self.size > 200:
            raise OSError(28, "No space left on device")
        return written(self, data)

    monkeypatch.setattr(files.Sink, "write", full)
    with pytest.raises(UserError, match=r"disk of .* is full.*last whole checkpoint is steps_1\."):
        store.save(Content(2, groups()))
        store.wait()
    assert store.newest()[0] == 1 and sorted(os.listdir(tmp_path)) == ["last", "steps_1"]


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for step, metric in enumerate([5.0, 3.0, 4.0, None, 3.5, 3.2], start=1):
        store.save(Content(step, groups(), about={} if metric is None else {"best": metric}), metric)
    assert [step for step, _ in store.listed()] == [2, 5, 6]
    assert (tmp_path / "best").resolve().name == "steps_2" and (tmp_path / "last").resolve().name == "steps_6"
    again = Checkpoints(tmp_path, keep=1)  # a resumed run knows the best of before
    again.save(Content(7, groups(), about={"best": 9.0}), 9.0)
    assert [step for step, _ in again.listed()] == [2, 7]
    again.save(Content(8, groups(), about={"best": 1.0}), 1.0)
    assert [step for step, _ in again.listed()] == [8]


def test_the_same_step_again_replaces_it(tmp_path):
    store = Checkpoints(tmp_path)
    store.save(Content(1, groups(0)))
    store.save(Content(1, groups(1)))
    same(formats.read(store.newest()[1], "model"), groups(1)["model"])
    assert sorted(os.listdir(tmp_path)) == ["last", "steps_1"]


# ------------------------------------------------------------------------------------------ rehearsal


def test_rehearsal_leaves_nothing_and_finds_faults(tmp_path, monkeypatch):
    content = Content(0, groups(), {"state.json": "{}"})
    assert "read back and equal" in rehearse(tmp_path, content, "safetensors", 0)
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match="will need"):
        rehearse(tmp_path, content, "pt", 1 << 60)
    monkeypatch.setattr(formats, "read", lambda path, group: {k: v * 2 for k, v in groups()[group].items()})
    with pytest.raises(UserError, match="does not come back as it was saved"):
        rehearse(tmp_path, content, "safetensors", 0)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be saved"):
        rehearse(tmp_path / "file" / "x", content, "safetensors", 0)


# ------------------------------------------------------------------------------------------ weights


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def test_ties_are_stored_once_and_filled(tmp_path):
    """One name of a tied pair is enough, whichever it is; without a tie it is missing."""
    source = Tied()
    store = Checkpoints(tmp_path)
    store.save(Content(1, {"model": model_tensors(source)}))
    stored = open_weights(tmp_path)
    assert len(load_file(store.newest()[1] / "model.safetensors")) == 3
    for tie in (True, False):
        target = Tied(tie)
        load_model(target, stored, own_layout())
        assert checksum(model_tensors(target)) == checksum(model_tensors(source))
    tensors = {name: value.clone() for name, value in model_tensors(source).items()}
    for dropped, kept in (("head.weight", "embed.weight"), ("embed.weight", "head.weight")):
        fewer = {name: value for name, value in tensors.items() if name != dropped}
        target = Tied()
        account = load_model(target, fewer, own_layout())
        assert account.tied == {dropped: kept} and len(account.loaded) == 3
        assert torch.equal(target.head.weight, source.head.weight)
        with pytest.raises(UserError, match=rf"1 missing \({dropped}\)"):
            load_model(Tied(tie=False), fewer, own_layout())


def test_loading_is_strict_and_names_all_faults():
    model = Tied(tie=False)
    tensors = {name: value.clone() for name, value in model_tensors(model).items()}
    broken = {f"old.{name}" if name == "body.bias" else name: value for name, value in tensors.items()}
    broken["body.weight"] = torch.zeros(8, 4)
    with pytest.raises(UserError) as caught:
        load_model(model, broken, own_layout())
    for words in ("1 missing (body.bias)", "1 unexpected (old.body.bias)", "body.weight (8, 4) instead of (4, 4)"):
        assert words in str(caught.value)
    account = load_model(model, {k: v for k, v in tensors.items() if k != "body.bias"}, own_layout(), ["body.bias"])
    assert account.new == ["body.bias"]


def test_another_layout_and_dtype():
    model = Tied(tie=False)
    before = {name: value.clone() for name, value in model_tensors(model).items()}
    layout = Layout("official", (Rule("net.{rest}", "{rest}"),))
    official = {f"net.{name}": value.to(torch.bfloat16) for name, value in before.items()}
    load_model(model, official, layout)
    assert model.body.weight.dtype == torch.float32
    torch.testing.assert_close(model.body.weight.data, before["body.weight"], rtol=1e-2, atol=1e-2)


def test_names_are_canonical_whatever_the_wrapper():
    model = Tied()
    plain = set(model_tensors(model))
    model.body = torch.compile(model.body)
    assert set(model_tensors(model)) == plain
    wrapped = nn.Module()
    wrapped.module = model
    assert set(model_tensors(wrapped)) == plain
    assert canonical("_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight") == "layers.0.mlp.weight"


def test_weights_are_found_in_files_folders_and_runs(tmp_path):
    run = tmp_path / "run"
    Checkpoints(run / "checkpoints").save(Content(3, groups()))
    newest = run / "checkpoints" / "steps_3"
    for given in (run, run / "checkpoints", newest, run / "checkpoints" / "last"):
        assert find_weights(given).resolve() == newest.resolve()
    assert find_weights(newest / "model.safetensors") == newest / "model.safetensors"
    torch.save(groups()["model"], tmp_path / "x.pt")
    same(open_weights(tmp_path / "x.pt"), groups()["model"])
    with pytest.raises(UserError, match="does not exist"):
        find_weights(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no weights"):
        open_weights(tmp_path / "empty")
    (newest / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="is broken"):
        open_weights(newest)
