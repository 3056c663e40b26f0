"""FastWAM: checkpoints of the authors, LeRobot and Wan2.2 become ours and go back; names of the encoders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlaforge.data.errors import UserError
from vlaforge.models import family
from vlaforge.models.convert import load_official
from vlaforge.models.fastwam.convert import LAYOUTS, interpolate
from vlaforge.models.fastwam.golden import Golden
from vlaforge.models.fastwam.model import Model
from vlaforge.models.video.names import UMT5_LAYOUTS, vae22_layouts
from vlaforge.runtime.checkpoint.weights import load_pretrained

GOLDENS = Path(__file__).parents[1] / "golden"


def test_release_and_lerobot_layouts_go_both_ways(folder, small):
    model = small("uncond")
    ours = {name: value.detach() for name, value in model.state_dict().items()}
    for name, layout in LAYOUTS.items():
        official = layout.save(ours)
        assert set(official) == set(folder.weights) or name == "lerobot"
        fresh = Model(model.config)
        account = load_official(fresh, LAYOUTS, official)
        assert account.layout == name and len(account.loaded) == len(ours)
        assert all(torch.equal(value, ours[key]) for key, value in fresh.state_dict().items())
    aliased = {**folder.weights, "dit.mixtures.video.head.head.bias": torch.zeros(1), "video_expert.x": torch.zeros(1)}
    assert len(load_official(Model(model.config), LAYOUTS, aliased).unused) == 2
    with pytest.raises(UserError, match="unexpected"):
        load_official(Model(model.config), LAYOUTS, {**folder.weights, "mot.mixtures.video.extra": torch.zeros(1)})


def test_older_lerobot_files_name_blocks_as_the_release_does(folder):
    older = {f"model.{name}": value for name, value in folder.weights.items()}
    account = load_official(Model(Golden(folder).config), LAYOUTS, older)
    assert account.layout == "lerobot" and len(account.loaded) == len(older)


def test_the_released_pt_file_is_read_as_it_is(folder, small, tmp_path):
    nested = {"mot": {}, "proprio_encoder": {}, "step": 7, "torch_dtype": "torch.bfloat16"}
    for name, value in folder.weights.items():
        part, rest = name.split(".", 1)
        nested[part][rest] = value
    torch.save(nested, tmp_path / "libero_uncond_2cam224.pt")
    model = Model(Golden(folder).config)
    account = load_pretrained(model, family("fastwam"), tmp_path / "libero_uncond_2cam224.pt")
    assert account.layout == "release" and not account.unused
    weights = small("uncond").state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_wan_folder_is_a_start(folder, tmp_path):
    """The video expert as it is; the action expert interpolated, or from the authors' file; the rest stays fresh."""
    prefix = "mot.mixtures.video."
    dit = {k.removeprefix(prefix): v for k, v in folder.weights.items() if k.startswith(prefix)}
    names = sorted(dit)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file(
            {name: dit[name] for name in part}, tmp_path / f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        )
    model = Model(Golden(folder).config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    account = load_pretrained(model, family("fastwam"), tmp_path)
    state = model.state_dict()
    fresh = {name for name in state if torch.equal(state[name], before[name])}
    assert fresh >= set(account.new) and all(n.startswith(("action.", "proprio_encoder.")) for n in account.new)
    assert torch.equal(state["layers.1.video.ffn.0.weight"], dit["blocks.1.ffn.0.weight"])
    made = interpolate(dit["blocks.1.ffn.0.weight"], tuple(state["layers.1.action.ffn.0.weight"].shape))
    assert torch.equal(state["layers.1.action.ffn.0.weight"], made) and "interpolated" in account.layout

    action = "mot.mixtures.action."
    keep = {k.removeprefix(action): v for k, v in folder.weights.items() if k.startswith(action)}
    backbone = {k: v for k, v in keep.items() if not k.startswith(("action_encoder.", "head."))}
    torch.save({"policy": {}, "backbone_state_dict": backbone, "meta": {"a": 1}}, tmp_path / "ActionDiT_x.pt")
    account = load_pretrained(model, family("fastwam"), tmp_path)
    assert "ActionDiT_x.pt" in account.layout
    assert torch.equal(model.state_dict()["layers.0.action.self_attn.o.weight"], keep["blocks.0.self_attn.o.weight"])

    small_dit = {name: value[:1] for name, value in dit.items()}
    save_file(small_dit, tmp_path / "diffusion_pytorch_model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match="does not fit the model"):
        load_pretrained(Model(model.config), family("fastwam"), tmp_path)


def test_interpolation_keeps_end_points_and_the_size_of_outputs():
    weight = torch.linspace(0, 1, 5)[:, None] + torch.linspace(0, 10, 9)
    small_weight = interpolate(weight, (3, 4))
    scale = (9 / 4) ** 0.5
    torch.testing.assert_close(small_weight[[0, -1]][:, [0, -1]], weight[[0, -1]][:, [0, -1]] * scale)
    torch.testing.assert_close(small_weight[1, 0] / scale, torch.tensor(0.5))
    vector = torch.linspace(0, 1, 9)
    torch.testing.assert_close(interpolate(vector, (5,)), torch.linspace(0, 1, 5))
    assert torch.equal(interpolate(weight, (5, 9)), weight)
    assert interpolate(torch.randn(1, 6, 8), (1, 6, 2)).shape == (1, 6, 2)


def test_names_of_the_encoders_go_both_ways():
    for layouts, name, own in (
        (vae22_layouts(), "wan_vae22", "weights_diffusers"),
        (UMT5_LAYOUTS, "umt5", "weights_hf"),
    ):
        official, library = (load_file(GOLDENS / name / f"{file}.safetensors") for file in ("weights", own))
        back = layouts["official"].save(library)
        assert back.keys() == official.keys()
        assert all(torch.equal(back[key].reshape(-1), official[key].reshape(-1)) for key in official)
