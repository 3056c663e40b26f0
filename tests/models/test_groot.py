"""GR00T N1.6 and N1.7: the official numbers, inventory, layouts, dropout, the split context, image shapes."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.data.schema import make_draw
from vlaforge.models import family
from vlaforge.models.action.dit import Context
from vlaforge.models.convert import load_official
from vlaforge.models.golden import Folder
from vlaforge.runtime.config import resolve
from vlaforge.runtime.parity import compare, table

GOLDENS = Path(__file__).parents[1] / "golden"
FAMILIES = ("groot_n1_6", "groot_n1_7")


@pytest.fixture(scope="module", params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def golden(name):
    return family(name).part("golden").Golden(Folder.read(GOLDENS / name))


@pytest.fixture(scope="module")
def full_size(name):
    with torch.device("meta"):
        return family(name).model(family(name).config())


@pytest.mark.parametrize("name, count", [("groot_n1_6", 244), ("groot_n1_7", 289)])
def test_they_have_the_official_numbers(name, count):
    report = compare(family(name), GOLDENS / name)
    assert report.passed, table(report)
    assert report.last_line() == f"parity {name}: {count} of {count} within tolerance"


# ------------------------------------------------------------------------------------------- full size and layouts

COUNTS = {
    "groot_n1_6": {"": 2_975_968_192, "projector": 13_644_800},
    "groot_n1_7": {"": 3_144_016_000, "vision": 406_957_056, "language.tokens": 311_164_928,
                   "head.context_blocks": 201_433_088, "head.dit": 1_091_722_240},
}  # fmt: skip


def test_full_size_has_the_official_parameter_counts(name, full_size):
    for path, count in COUNTS[name].items():
        assert sum(p.numel() for p in full_size.get_submodule(path).parameters()) == count, path


@pytest.mark.parametrize("layout, prefix", [("nvidia", ""), ("lerobot", "_groot_model.")])
def test_full_size_writes_exactly_the_official_keys(name, full_size, layout, prefix):
    layouts = family(name).part("convert").LAYOUTS
    lines = (GOLDENS / name / "full_size_keys.txt").read_text().splitlines()
    expected = {prefix + key: literal_eval(shape) for key, shape in (line.split("\t") for line in lines)}
    # The output head is the token embedding under another name, and no file needs to hold it twice.
    aliases = [key for key in expected if key.endswith("lm_head.weight")]
    assert len(aliases) == 1
    del expected[aliases[0]]
    saved = layouts[layout].save(full_size.state_dict())
    assert {key: tuple(value.shape) for key, value in saved.items()} == expected


@pytest.mark.parametrize("layout", ["nvidia", "lerobot"])
def test_weights_go_out_and_come_back(golden, layout):
    source, target = golden.model(), golden.model()
    golden.load(source)
    saved = golden.layouts[layout].save(source.state_dict())
    assert load_official(target, golden.layouts, saved).layout == layout
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values()))
    official = {golden.layouts[layout].prefix + key for key in golden.folder.weights}
    assert official == set(saved)


def test_what_trains_follows_the_switches(name, full_size):
    """Published defaults: the head, and of N1.6 the top four language layers. A weight that nothing reads is frozen."""
    trained = {n for n, p in full_size.named_parameters() if p.requires_grad}
    layers = {int(n.split(".")[2]) for n in trained if n.startswith("language.layers.")}
    assert layers == (set(range(12, 16)) if name == "groot_n1_6" else set())
    assert not any(n.startswith(("vision.", "language.tokens", "language.norm")) for n in trained)
    assert any(n.startswith("head.dit") for n in trained)
    with torch.device("meta"):
        whole = family("groot_n1_7").model(family("groot_n1_7").config(tune_llm=True, tune_visual=True))
    assert [n for n, p in whole.named_parameters() if not p.requires_grad] == ["language.norm.weight"]


@pytest.mark.parametrize("name, setting, message", [
    ("groot_n1_6", "vision.full_layers=[7,27]", "full_layers is .7, 27.: they must be different numbers from 0 to 26"),
    ("groot_n1_6", "vision.layers=12", "full_layers .* as model.vision.layers is 12"),
    ("groot_n1_6", "tune_top_llm_layers=17", "tune_top_llm_layers is 17; it must be at most model.text.layers, 16"),
    ("groot_n1_7", "vision.deepstack=[5,11,24]", "deepstack is .5, 11, 24.: .* from 0 to 23"),
    ("groot_n1_7", "vision.deepstack=[5,5]", "deepstack is .5, 5.: they must be different"),
    ("groot_n1_7", "vision.deepstack=" + str(list(range(17))).replace(" ", ""), "behind a layer of the language model"),
    ("groot_n1_7", "text.layers=8", "select_layer is 16 and model.text.layers is 8"),
    ("groot_n1_7", "text.mrope=[24,20,24]", "must sum to half of model.text.head_dim, 64"),
])  # fmt: skip
def test_layers_must_be_there(name, setting, message):
    with pytest.raises(UserError, match=message):
        resolve(["--model", name, f"model.{setting}"])


# ------------------------------------------------------------------------------------------- the model


def tiny(name: str, **changes):
    """(model in training mode, batch of 3, draw) of the tiny preset."""
    resolved = resolve(["--model", name, "--preset", "tiny"])
    config = replace(resolved.model_config, **changes)
    torch.manual_seed(0)
    model, contract = family(name).model(config).train(), family(name).model.contract(config)
    batch = contract.synthetic(3, seed=1)
    batch["token_mask"][1, :40] = False
    return model, batch, make_draw(contract.draws, range(3), seed=0, epoch=0)


def test_the_split_context_is_the_masked_one(name):
    """With a known number of image tokens, text and images are gathered apart; the velocities are those of masks."""
    model, batch, draw = tiny(name)
    model.eval()
    with torch.no_grad():
        features, image_BL, count = model.features(batch)
        assert count == model.image_tokens == image_BL.sum(1).unique().item()
        state = model.head.encode_state(batch["state"], batch["embodiment"])
        velocities = []
        for known in (count, None):
            context = model.head.read_context(features, batch["token_mask"], image_BL, known)
            assert isinstance(context, Context) and (context.text_BNC is None) == (known is None)
            keys = model.head.dit.keys_values(context)
            bucket = model.bucket(draw["time"])
            velocities.append(model.head.velocity(draw["noise"], bucket, state, batch["embodiment"], keys, context))
    torch.testing.assert_close(*velocities, atol=1e-5, rtol=1e-5)


def test_images_need_not_be_square(name):
    """The same numbers as from ready patches with their grid, which the recorded results are compared with."""
    model, batch, draw = tiny(name, image_size=48, image_width=64)
    assert batch["images"].shape == (3, 2, 48, 64, 3) and model.image_tokens == 2 * 3 * 4
    ready = type(batch)(batch)
    images = ready.pop("images").flatten(0, 1).permute(0, 3, 1, 2)
    ready["patches"] = model.vision.patchify(images / 127.5 - 1).unflatten(0, (3, 2))
    ready["grids"] = torch.tensor([6, 8]).expand(3, 2, 2)
    torch.testing.assert_close(model(batch, draw).total(), model(ready, draw).total(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("top", [0, 1])
def test_the_frozen_start_runs_ahead_with_the_same_loss(name, top):
    model, batch, draw = tiny(name, tune_llm=False, tune_visual=False, tune_top_llm_layers=top)
    ahead = model.encode_frozen(batch)
    if model.frozen_layers == 0:
        assert ahead is batch
        return
    assert "images" not in ahead and not ahead["hidden"].requires_grad
    assert torch.equal(model(ahead, draw).total(), model(batch, draw).total())


def test_dropout_is_a_function_of_the_samples_seeds(name):
    model, batch, draw = tiny(name, state_dropout_prob=0.4)
    first = model(batch, draw).total()
    assert torch.equal(first, model(batch, draw).total())
    draw["dropout"] = draw["dropout"] + 1
    assert not torch.equal(first, model(batch, draw).total())
    assert not torch.equal(first, model.eval()(batch, draw).total())
