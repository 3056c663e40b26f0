"""Recompute of modules that somebody names."""

from functools import partial

import pytest
import torch

from vlaforge.data.errors import UserError

NAMED = ("layers.*.language.mlp", "vision.layers.*")


def recomputed(plan):
    return [site.path for site in plan.entry("remat").sites]


def test_named_modules_are_recomputed_and_nothing_changes(pi05):
    plain, model = pi05.model(), pi05.model()
    want = pi05.train(plain, pi05.only(plain), steps=4)
    plan = pi05.only(model, "remat", remat_modules=NAMED, remat_skip=("vision.layers.0",))
    run = pi05.train(model, plan, steps=4)
    assert run.losses == want.losses
    depth = pi05.config.language.depth
    assert recomputed(plan) == [
        *(f"vision.layers.{i}" for i in range(1, pi05.config.vision.depth)),
        *(f"layers.{i}.language.mlp" for i in range(depth)),
    ]  # fmt: skip


def test_inside_of_compiled_blocks(pi05, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, model = pi05.model(), pi05.model()
    want = pi05.train(plain, pi05.only(plain), steps=2)
    plan = pi05.only(model, "compile_blocks", "remat", compile="on", remat_modules=("layers.*.expert.mlp",))
    run = pi05.train(model, plan, steps=2)
    assert plan.on("compile_blocks") and len(recomputed(plan)) == pi05.config.language.depth
    assert run.losses == pytest.approx(want.losses, rel=1e-4)


def test_a_part_that_is_packed_is_left_to_packing(pi05):
    model = pi05.model()
    plan = pi05.plan(model, compile="off", remat_modules=("layers.*.expert.qkv.q_proj",))
    assert plan.on("pack") and not plan.on("remat") and "'pack' has the same place" in plan.entry("remat").reason


@pytest.mark.parametrize(
    "named, skip, words",
    [
        (("layers.*.langage",), (), "did you mean 'layers.*.language'"),
        (("layers.*", "layers.*.expert"), (), "'layers.0' around it"),
        (("layers..expert",), (), "empty segment"),
        (("layers",), (), "Unknown module"),
        (("layers.*",), ("vision.layers.0",), "Unknown module in --activation-checkpoint-skip-modules"),
        ((), ("layers.0",), "without --activation-checkpoint-module-patterns"),
    ],
)
def test_what_cannot_be_meant(pi05, named, skip, words):
    with pytest.raises(UserError, match=words.replace("*", r"\*")):
        pi05.plan(pi05.model(), compile="off", remat_modules=named, remat_skip=skip)
