"""FastWAM: the official numbers, what is left out or cut changes nothing, encoders, estimates, structure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlaforge.data.collate import trimmed
from vlaforge.data.errors import UserError
from vlaforge.data.schema import Batch, make_draw
from vlaforge.graphs import PlanOptions, make_plan
from vlaforge.graphs.cost import step_cost
from vlaforge.models import family
from vlaforge.models.fastwam.config import ExpertConfig, ModelConfig
from vlaforge.models.fastwam.golden import Golden
from vlaforge.models.fastwam.model import Model
from vlaforge.models.golden import subject
from vlaforge.runtime.parity import compare, lower_with, table

GOLDENS = Path(__file__).parents[1] / "golden"
GOLDEN = GOLDENS / "fastwam"
VARIANTS = ("uncond", "joint", "idm")


def gradients(model: Model, batch: Batch, draw) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model.loss(batch, draw).total()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def close(got, want, share=2e-5):
    assert got[0].item() == pytest.approx(want[0].item(), rel=share)
    largest = max(gradient.abs().max() for gradient in want[1])
    for a, b in zip(got[1], want[1], strict=True):
        assert (a - b).abs().max() <= share * largest


# ---------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("lower", [None, lower_with(compile="off")], ids=["plain", "lowered"])
def test_every_recorded_quantity_is_the_official_one(lower):
    report = compare(family("fastwam"), GOLDEN, lower)
    assert not [row for row in report.rows if not row.ok], table(report)
    assert report.last_line() == "parity fastwam: 208 of 208 within tolerance"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernels_of_a_gpu_plan_compute_the_same(variant, folder, small):
    """On a CPU they run their references, through the same table from block to kernel."""
    batch, draw = Golden(folder).inputs()
    plain, lowered = small(variant), small(variant)
    contract = Model.contract(plain.config)
    without = ("pack", "hoist")  # parameters under their own names
    plan = make_plan(lowered, contract, PlanOptions(device="h200", compile="off", batch_size=2, without=without))
    plan.lower(lowered)
    sites = [site.what for site in plan.entry("fuse").sites]
    assert sites.count("qk_norm_rope") == 4 and sites.count("gated_residual") == 8
    assert sites.count("ada_layer_norm") == 4 * 2 + 1
    close(gradients(lowered, batch, draw), gradients(plain, batch, draw))


@pytest.mark.parametrize("name, count", [("wan_vae22", 4), ("umt5", 2)])
def test_encoders_have_the_official_numbers(name, count):
    report = compare(subject(name), GOLDENS / name, None)
    assert report.passed and report.last_line() == f"parity {name}: {count} of {count} within tolerance", table(report)


def test_full_size_has_the_published_parameters():
    """Facts: 4,999,787,712 of the video expert, 1,020,886,023 of the action expert at 7 dimensions."""
    with torch.device("meta"):
        model = Model(ModelConfig())
    towers = {
        name: sum(p.numel() for path in paths for p in model.get_submodule(path).parameters())
        for name, paths in model.towers().items()
    }
    assert towers == {"video": 4_999_787_712, "action": 1_020_886_023, "proprio": 8 * 4096 + 4096}
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(towers.values())
    with torch.device("meta"):
        encoders = {"vae": model.vae.build(), "text": model.text.build()}
    sizes = {name: sum(p.numel() for p in net.parameters()) for name, net in encoders.items()}
    assert sizes == {"vae": 704_688_668, "text": 5_680_910_336}


# ---------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_no_loss_reads_may_be_left_out(variant, folder, small):
    batch, draw = Golden(folder).inputs()
    whole = gradients(small(variant, skip_unused=False), batch, draw)
    close(gradients(small(variant), batch, draw), whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cut_text_padding_is_attended_to_all_the_same(variant, folder, small):
    """Padded rows have one key; one row with its score raised by log n stands for n of them."""
    batch, draw = Golden(folder).inputs()
    batch["context"], batch["token_mask"] = (
        batch["context"][:1].expand(2, -1, -1),
        batch["token_mask"][:1].expand(2, -1),
    )
    model = small(variant)
    for kept in (4, 5):
        cut = Batch(batch, context=batch["context"][:, :kept])
        close(gradients(model, cut, draw), gradients(model, batch, draw))
    obs = Batch(batch, latents=batch["latents"][:, :, :1])
    cut = Batch(obs, context=obs["context"][:, :4])
    for got, want in zip(model.sample(cut, draw, 2, video=True), model.sample(obs, draw, 2, video=True)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_has_no_influence(variant, folder, small):
    """Garbage in padded targets, in rows of text padding and in padded frames changes nothing, bit for bit."""
    batch, draw = Golden(folder).inputs()
    model = small(variant)
    clean = gradients(model, batch, draw)
    dirty = Batch(batch)
    dirty["actions"] = torch.where(batch["action_mask"], batch["actions"], 1e3)
    dirty["context"] = torch.where(batch["token_mask"][..., None], batch["context"], 7.0)
    loss, found = gradients(model, dirty, draw)
    assert torch.equal(loss, clean[0]) and all(torch.equal(a, b) for a, b in zip(found, clean[1]))
    draw["video_noise"] = draw["video_noise"].clone()
    assert not batch["frame_mask"][1, 5:].any()
    errors = model.loss(batch, draw)
    assert errors.terms["video_loss"].count == 2 and model.counts(batch)["video_loss"] == 2


def test_a_sample_without_a_valid_target_adds_nothing_but_its_share_of_the_count(folder, small):
    batch, draw = Golden(folder).inputs()
    model = small("uncond")
    batch["action_mask"] = batch["action_mask"] & torch.tensor([True, False])[:, None, None]
    batch["frame_mask"] = batch["frame_mask"] & torch.tensor([True, False])[:, None]
    both = model.loss(batch, draw)
    one = model.loss(batch.map(lambda x: x[:1]), draw.map(lambda x: x[:1]))
    for name in both.terms:
        torch.testing.assert_close(both.terms[name].sum, one.terms[name].sum, rtol=1e-5, atol=1e-6)
        assert (both.terms[name].count, one.terms[name].count) == (2, 1)


def test_sampling_keeps_keys_instead_of_computing_them_again(folder, small):
    """One joint step by the training forward, against the sampler's."""
    batch, draw = Golden(folder).inputs()
    model = small("joint")
    obs = Batch(batch, latents=batch["latents"][:, :, :1])
    actions, latents = model.sample(obs, draw, 1, video=True)
    noisy = torch.cat([obs["latents"], draw["video_noise"][:, :, 1:]], dim=2)
    time_B = torch.full((2,), 1000.0)
    times_BG = torch.stack([time_B * 0, time_B, time_B], dim=1)
    with torch.no_grad():
        video, action = model.velocities(noisy, times_BG, draw["noise"], time_B, batch)
    torch.testing.assert_close(actions, draw["noise"] - action, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(latents[:, :, 1:], draw["video_noise"][:, :, 1:] - video, rtol=1e-4, atol=1e-4)
    assert torch.equal(latents[:, :, :1], obs["latents"])


def test_idm_acts_on_the_video_that_it_imagined(folder, small):
    batch, draw = Golden(folder).inputs()
    model = small("idm")
    obs = Batch(batch, latents=batch["latents"][:, :, :1])
    actions, latents = model.sample(obs, draw, 3, video=True)
    assert torch.equal(model.act(obs, draw, 3), actions)
    other = Batch(draw, video_noise=draw["video_noise"].flip(0))
    moved, imagined = model.sample(obs, other, 3, video=True)
    assert not torch.allclose(imagined, latents) and not torch.allclose(moved, actions)
    assert torch.equal(small("uncond").act(obs, draw, 3), small("uncond").act(obs, other, 3))


# ---------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("sources", [("pixels", "tokens"), ("latents", "tokens"), ("latents", "context")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_synthetic_batches_train_whatever_they_hold(variant, sources):
    tiny = tiny_config(variant=variant, video_source=sources[0], text_source=sources[1])
    contract = Model.contract(tiny)
    model = Model(tiny)
    batch = trimmed(contract.synthetic(2), contract.trims)
    draw = make_draw(contract.draws, [0, 1], seed=0, epoch=0)
    loss, found = gradients(model, batch, draw)
    assert torch.isfinite(loss) and all(gradient is not None for gradient in found)
    encoded = model.encode_frozen(batch)
    assert model.encode_frozen(encoded) is encoded and torch.equal(model.loss(encoded, draw).total(), loss)
    assert "images" not in encoded and "tokens" not in encoded
    assert model.act(batch, draw, 2).shape == (2, tiny.action_horizon, tiny.max_action_dim)
    assert not any(name.startswith(("vae", "text.")) for name in model.state_dict())


def tiny_config(**changes) -> ModelConfig:
    from vlaforge.runtime.config import resolve

    return replace(resolve(["--model", "fastwam", "--preset", "tiny"]).model_config, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"variant": "jont"}, "joint"),
        ({"layout": "rows"}, "row"),
        ({"video_attention": "causal"}, "per_frame_causal"),
        ({"variant": "idm", "video_attention": "bidirectional"}, "first_frame_causal or per_frame_causal"),
        ({"height": 40}, "multiples of"),
        ({"video_frames": 6}, "1 \\+ 4k"),
        ({"action_horizon": 30}, "multiple of model.video_frames - 1"),
        ({"action_dim": 9}, "more than model.max_action_dim"),
        ({"text_dim": 64}, "encoders do not fit"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(changes, message):
    with pytest.raises(UserError, match=message):
        replace(tiny_config(), **changes)


def test_base_means_uncond_and_masks_must_allow_sampling():
    assert replace(tiny_config(), variant="base").variant == "uncond"
    model = Model(tiny_config(video_attention="bidirectional", video_source="latents", text_source="context"))
    contract = Model.contract(model.config)
    draw = make_draw(contract.draws, [0], seed=0, epoch=0)
    with pytest.raises(UserError, match="first_frame_causal"):
        model.act(contract.synthetic(1), draw, 1)


def test_estimates_on_the_meta_device_read_no_weights(tmp_path):
    weights = tmp_path / "Wan2.2_VAE.pth"
    weights.write_bytes(b"not read")
    config = tiny_config()
    with torch.device("meta"):
        model = Model(replace(config, vae=replace(config.vae, seed=None, path=str(tmp_path))))
    memory = step_cost(model, Model.contract(config), PlanOptions(device="cpu", batch_size=2))[0].memory
    encoders = model.frozen_networks("meta")
    assert memory.frozen == sum(p.numel() * p.element_size() for net in encoders.values() for p in net.parameters())
    assert set(encoders) == {"vae", "text"} and memory.activations > 0


def test_norms_of_q_and_k_are_one_kernel_with_the_rotary():
    """A layer has two experts; each norms self attention's q and k with the rotary, the text's q and k alone."""
    config = tiny_config()
    with torch.device("meta"):
        model = Model(config)
    plan = make_plan(model, Model.contract(config), PlanOptions(device="h200"))
    fused = next(entry.sites for entry in plan.entries if entry.name == "fuse")
    kinds = [site.what for site in fused]
    assert kinds.count("qk_norm_rope") == 2 * config.layers and kinds.count("rms_norm") == 4 * config.layers


def test_the_encoders_run_ahead_whatever_is_sharded():
    model = Model(tiny_config())
    plan = make_plan(model, Model.contract(model.config), PlanOptions(device="cpu", world=2, strategy="fsdp"))
    assert [site.what for site in plan.entry("overlap").sites] == ["copy", "encoder"]


def test_missing_weights_of_an_encoder_are_named():
    for part, setting in (("vae", "model.vae.path"), ("text", "model.text.path")):
        config = tiny_config()
        broken = Model(replace(config, **{part: replace(getattr(config, part), seed=None)}))
        with pytest.raises(UserError, match=f"{setting} is empty"):
            getattr(broken, part).net("cpu")
        broken = Model(replace(config, **{part: replace(getattr(config, part), path="/nowhere")}))
        with pytest.raises(UserError, match=f"{setting} '/nowhere' does not exist"):
            getattr(broken, part).check()


# ---------------------------------------------------------------------------------------------------- structure


def test_blocks_are_of_one_class_and_towers_cover_every_parameter():
    model = Model(tiny_config())
    (group,) = model.blocks()
    assert {type(block) for block in group.modules(model)} == {type(model.layers[0])} and len(group.names) == 3
    covered = {
        id(p) for paths in model.towers().values() for path in paths for p in model.get_submodule(path).parameters()
    }
    assert covered == {id(parameter) for parameter in model.parameters()}


def test_experts_of_other_widths_share_one_attention():
    wide = tiny_config(action=ExpertConfig(96, 64), heads=3, head_dim=24)
    contract = Model.contract(wide)
    losses = Model(wide).loss(contract.synthetic(1), make_draw(contract.draws, [0], seed=0, epoch=0))
    assert torch.isfinite(losses.total())
