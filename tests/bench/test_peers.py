"""Official implementations beside us: inputs are what their own data side would make, and they compute our loss."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from vlaforge import models
from vlaforge.bench.peer import Peer, lend
from vlaforge.bench.prompts import write_prompts
from vlaforge.bench.sides import Case, Ours, config_of, fresh_model, load_case, make_minibatch
from vlaforge.graphs import PlanOptions

TINY = {
    "xvla": {"mlp_dropout": 0.0, "num_image_views": 3, "max_len_seq": 128},
    "groot_n1_7": {"dit": {"dropout": 0.0}, "mask_vl_padding": False},
}
"""What makes a tiny preset a peer's case: no dropout, and the published treatment of padding."""


def tiny_case(name: str, grouping: dict[str, str] | None = None) -> Case:
    chosen = models.family(name)
    config = config_of(chosen, "tiny", {"action_dim": 5, "state_dim": 4})
    settings = {key: replace(getattr(config, key), **value) if isinstance(value, dict) else value
                for key, value in TINY[name].items()}  # fmt: skip
    config = replace(config, **settings)
    contract = chosen.model.contract(config)
    valid = {"action_mask.-1": 5} | ({"image_mask": 2} if name == "xvla" else {})
    minibatch = make_minibatch(contract, 2, 0, valid)
    if name == "groot_n1_7":
        write_prompts(chosen, config, minibatch.batch, (9, 6))
    return Case(chosen, "tiny", config, contract, 2, (minibatch,), valid, grouping or {})


def test_groot_prompts_hold_images_in_place():
    """Image tokens between their marks, words behind, padding in front, and positions that its data side computes."""
    case = load_case("groot_n1_7", "as_shipped")
    batch, config = case.minibatches[0].batch, case.config
    assert batch["token_mask"].sum(1).tolist() == [4 + 2 * 51 + 24, 4 + 2 * 51 + 20]
    assert batch["token_mask"][:, -1].all()
    assert ((batch["tokens"] == config.image_token).sum(1) == 2 * 49).all()
    starts = (batch["tokens"] == config.vision_start_token).nonzero()
    assert len(starts) == 4
    assert all(batch["tokens"][row, at + 1] == config.image_token for row, at in starts.tolist())
    assert (batch["positions"].transpose(1, 2)[~batch["token_mask"]] == 0).all()
    # Two views of 7 x 7 tokens take 7 positions each.
    assert batch["positions"][0].amax(1).tolist() == [4 + 2 * (2 + 7) + 24 - 1] * 3
    assert not config.tune_llm and load_case("groot_n1_7", "tight").config.tune_llm


def test_official_groups_reach_the_optimizer():
    case = tiny_case("xvla", {"lr_group": "vlm=2.5e-6,policy.vlm_proj=2.5e-6"})
    ours = Ours("ours", case, PlanOptions(device="cpu", compile="off"))
    rates = {group.name: group.lr for group in ours.optimizer.groups}
    assert rates == {"vlm": 2.5e-6, "policy.vlm_proj": 2.5e-6, "base": 2.5e-5}
    timed = ours.run(1)
    assert len(timed.cpu) == 1 and "cpu_p50" in timed.summary()


def test_a_peer_borrows_what_its_interpreter_lacks(tmp_path, monkeypatch):
    """A package of ours becomes importable there; what it has itself is not touched."""
    monkeypatch.setattr("vlaforge.bench.peer.LENT", ("pytest", "no-such-package"))
    (tmp_path / "bare").write_text('#!/bin/sh\nexec "$PYTHON" -S "$@"\n')
    (tmp_path / "bare").chmod(0o755)
    monkeypatch.setenv("PYTHON", sys.executable)
    environment = lend(str(tmp_path / "bare"), tmp_path / "lent")
    assert (tmp_path / "lent/pytest/__init__.py").exists() and list((tmp_path / "lent").glob("pytest-*.dist-info"))
    assert environment["PYTHONPATH"].startswith(str(tmp_path / "lent"))
    lend(sys.executable, tmp_path / "own")
    assert not list((tmp_path / "own").iterdir())


@pytest.mark.parametrize("family", ["xvla", "groot_n1_7"])
def test_lerobots_own_step_computes_our_loss(family):
    """The official policy on our exported weights, at tiny size: one step in its own interpreter."""
    python = os.environ.get("VLAFORGE_PEER_PYTHON")
    if not python:
        pytest.skip("set VLAFORGE_PEER_PYTHON to an interpreter with lerobot 0.6.1 (pip install 'lerobot[groot]')")
    case = tiny_case(family)
    state = {name: value.clone() for name, value in fresh_model(case).state_dict().items()}
    ours = Ours("ours", case, PlanOptions(device="cpu", compile="off"), state)
    with Peer("lerobot", python, case, state, "float32", 1) as peer:
        assert ours.run(1).losses == pytest.approx(peer.run(1).losses, rel=1e-4)
        assert peer.about()["versions"]["lerobot"]
