"""The training benchmark's pieces: both recipes compute one loss, cases are what they say, tables add up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml

from vlaforge import models
from vlaforge.bench import train as bench_train
from vlaforge.bench.cli import main
from vlaforge.bench.peer import Peer, find_peer
from vlaforge.bench.record import plan_facts, write_record
from vlaforge.bench.restated import Restated, restated_loss
from vlaforge.bench.sides import CASES, Case, Ours, Timed, config_of, fresh_model, interleave, load_case, make_minibatch
from vlaforge.data.errors import UserError
from vlaforge.graphs import PlanOptions, make_plan
from vlaforge.runtime.config import resolve
from vlaforge.runtime.guards import GuardConfig


@pytest.fixture(scope="module")
def tiny() -> Case:
    family = models.family("pi05")
    config = replace(config_of(family, "tiny"), num_images=3)
    contract = family.model.contract(config)
    valid = {"image_mask": 2, "token_mask": 20, "action_mask.-1": 5}
    batches = tuple(make_minibatch(contract, 2, seed, valid) for seed in range(2))
    return Case(family, "tiny", config, contract, 2, batches, valid)


def test_restated_recipe_computes_the_same_loss_and_gradients(tiny):
    """Joint masked attention over all three slots and 48 tokens against ours over what is there."""
    model = fresh_model(tiny)
    minibatch = tiny.minibatches[0]
    ours = model.loss(minibatch.batch, minibatch.draw).total()
    ours.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    theirs = restated_loss(model, minibatch.batch, minibatch.draw)
    theirs.backward()
    assert float(theirs.detach()) == pytest.approx(float(ours.detach()), rel=1e-5)
    total = torch.stack([g.norm() for g in wanted.values()]).norm()
    for name, want in wanted.items():
        assert (model.get_parameter(name).grad - want).norm() < 1e-4 * want.norm() + 1e-6 * total, name


def test_sides_train_alike_in_turns(tiny):
    state = {name: value.clone() for name, value in fresh_model(tiny).state_dict().items()}
    ours = Ours("ours", tiny, PlanOptions(device="cpu", compile="off"), state)
    theirs = Restated(tiny, torch.float32, torch.device("cpu"), state)
    warm, measured = interleave([ours, theirs], rounds=2, steps=2, warmup=1)
    assert [len(t.losses) for t in measured.values()] == [4, 4]
    assert warm["ours"].losses[0] == pytest.approx(warm["official recipe"].losses[0], rel=1e-5)
    assert measured["ours"].losses == pytest.approx(measured["official recipe"].losses, rel=1e-3)
    assert ours.plan.on("trim_tokens") and all(s > 0 for s in measured["ours"].seconds)


def test_every_timed_step_updates_the_weights(tiny):
    """Losses are far above what a run's guard trains on by default, as X-VLA's with random weights; and a step that is
    refused is not timed."""
    made = make_minibatch(tiny.contract, 2, 0, tiny.valid)
    made.batch["actions"].mul_(100)
    ours = Ours("ours", replace(tiny, minibatches=(made,)), PlanOptions(device="cpu", compile="off"))
    first, second = ours.run(2).losses
    assert min(first, second) > GuardConfig().spike_threshold and first != second
    with torch.no_grad():
        next(ours.model.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="1 steps were refused"):
        ours.run(1)


def test_a_record_has_the_plan_in_few_lines_and_comes_back(tiny, tmp_path):
    plan = make_plan(fresh_model(tiny), tiny.contract, PlanOptions(device="cpu", compile="on"))
    body = {"plan": plan_facts(plan), "seconds": [0.125] * 20, "by number": {3: {"π": None}}, "empty": [{}, []]}
    path = write_record(tmp_path, "x", body)
    read, lines = json.loads(path.read_text(encoding="utf-8")), path.read_text(encoding="utf-8").splitlines()
    assert read == {**body, "by number": {"3": {"π": None}}}
    assert "\n".join(read["plan"]["text"]) == plan.text()
    for entry in plan.entries:
        assert sum(read["plan"]["sites"].get(entry.name, {}).values()) == len(entry.sites)
    assert ' "by number": {"3": {"π": null}},' in lines
    assert 3 * len(lines) < len(json.dumps({**body, "plan": plan.json()}, indent=1).splitlines())


def test_config_without_the_command_line_is_the_same():
    for preset in ("tiny", "midsize"):
        assert config_of(models.family("pi05"), preset) == resolve(["--model", "pi05", "--preset", preset]).model_config


def test_cases_fill_what_they_say():
    shipped, tight = load_case("pi05", "as_shipped"), load_case("pi05", "tight")
    batch = shipped.minibatches[0].batch
    assert batch["image_mask"].tolist() == [[True, True, False]] * 2 and batch["token_mask"].sum(1).tolist() == [50, 50]
    assert batch["action_mask"].sum().item() == 2 * 50 * 14 and shipped.sizes == {"image_mask": 2, "token_mask": 50}
    full = tight.minibatches[0].batch
    assert full["image_mask"].all() and full["token_mask"].all() and full["images"].shape == (2, 2, 224, 224, 3)
    assert sum(p.numel() for p in fresh_model(tight).parameters()) > 50e6
    assert set(yaml.safe_load(CASES.read_text())) <= set(models.available())
    with pytest.raises(UserError, match=r"LeRobot 0\.6\.1 has N1\.7 alone"):
        load_case("groot_n1_6", "tight")
    with pytest.raises(UserError, match=r"bench/cases\.yaml has"):
        load_case("pi05", "tight", preset="small")


def test_unknown_peer_and_absent_interpreter_are_said(capsys):
    with pytest.raises(UserError, match="lerobot"):
        find_peer("lerobott", "pi05")
    flags = ["train", "--model", "pi05", "--peer", "lerobot"]
    assert main([*flags, "--peer-python", ""]) == 2
    assert "VLAFORGE_PEER_PYTHON" in capsys.readouterr().err


def test_a_peer_is_asked_by_lines(tiny, tmp_path, monkeypatch):
    """The protocol, with a stand-in that answers from the job it was handed."""
    script = tmp_path / "echo_pi05.py"
    script.write_text(
        "import json, sys\n"
        "job = json.load(open(sys.argv[1]))\n"
        "for line in sys.stdin:\n"
        "    print('noise that is no answer')\n"
        "    n = int(line.split()[1]) if line.startswith('run') else 0\n"
        "    body = {'seconds': [1.0] * n, 'losses': [0.5] * n, 'config': job['config']['action_horizon'],\n"
        "            'batches': len(job['batches']), 'weights': open(job['weights'], 'rb').read(8).hex()}\n"
        "    if line.startswith('die'): raise SystemExit('out of memory')\n"
        "    print(json.dumps(body), flush=True)\n"
    )
    monkeypatch.setattr("vlaforge.bench.peer.PEERS", tmp_path)
    import sys

    state = fresh_model(tiny).state_dict()
    with Peer("echo", sys.executable, tiny, state, "float32", 1) as peer:
        assert peer.run(3) == Timed([1.0] * 3, [0.5] * 3)
        about = peer.about()
        assert about["config"] == tiny.config.action_horizon and about["batches"] == 2 and about["weights"]
        with pytest.raises(UserError, match="out of memory"):
            peer.ask("die")


def test_table_compares_with_the_base(tmp_path):
    measured = {"eager": Timed([0.2] * 4, [1.0] * 4), "+ fuse": Timed([0.1] * 4, [1.0] * 4)}
    lines = bench_train.table(measured, "eager").splitlines()
    assert lines[1].endswith("1.00x") and lines[2].endswith("2.00x") and "100" in lines[2]
    timed = Timed([float(n) for n in range(1, 21)]).summary()
    assert timed == {"p50": 10.5, "p95": 20.0, "min": 1.0, "n": 20}
    assert json.dumps(timed)


def test_fastwam_gives_latents_and_text():
    shipped = load_case("fastwam", "as_shipped")
    batch = shipped.minibatches[0].batch
    assert batch["latents"].shape == (2, 48, 3, 8, 12) and batch["context"].shape == (2, 128, 512)
    assert batch["token_mask"].sum(1).tolist() == [30, 30]
    assert sum(p.numel() for p in fresh_model(shipped).parameters()) > 14e6
