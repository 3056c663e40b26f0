"""π0.5 as a model: full-size inventory, purity, masks, trims, sampling, freezing."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vlaforge.data.collate import trimmed
from vlaforge.data.errors import UserError
from vlaforge.data.schema import Batch, Draw, make_draw
from vlaforge.models.convert import load_official
from vlaforge.models.golden import Folder, to_bfloat16
from vlaforge.models.pi05.config import ModelConfig
from vlaforge.models.pi05.convert import LAYOUTS
from vlaforge.models.pi05.golden import Golden
from vlaforge.models.pi05.model import Model
from vlaforge.models.towers.gemma import GemmaConfig
from vlaforge.models.towers.siglip import SiglipConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05"


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden(Folder.read(GOLDEN))


@pytest.fixture(scope="module")
def model(golden) -> Model:
    model = golden.model()
    golden.load(model)
    return model


@pytest.fixture
def inputs(golden) -> tuple[Batch, Draw]:
    return golden.inputs()


@pytest.fixture(scope="module")
def full_size() -> Model:
    with torch.device("meta"):
        return Model(ModelConfig())


def run(model: Model, batch: Batch, draw: Draw) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and every gradient by name."""
    model.zero_grad(set_to_none=True)
    loss = model(batch, draw).total()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


# ------------------------------------------------------------------------------------------- full size


def test_full_size_has_the_official_parameter_counts(full_size):
    def count(*paths: str) -> int:
        return sum(p.numel() for path in paths for p in full_size.get_submodule(path).parameters())

    layers = [f"layers.{i}" for i in range(18)]
    assert count("vision") == 412_442_352
    assert count("projector") == 2_361_344
    assert count("norm", *(f"{layer}.language" for layer in layers)) == 1_981_884_416
    assert count("embed") == 526_647_296
    assert count("expert_norm", *(f"{layer}.expert" for layer in layers)) == 427_932_672
    assert count("time", "action_in", "action_out") == 2_165_792
    assert count("expert_lm_head") == 263_323_648
    assert sum(p.numel() for p in full_size.parameters()) == 3_616_757_520


@pytest.mark.parametrize("layout, prefix", [("lerobot", "model."), ("openpi", "")])
def test_full_size_writes_exactly_the_official_keys(full_size, layout, prefix):
    listed = [line.split("\t") for line in (GOLDEN / "full_size_keys.txt").read_text().splitlines()]
    expected = {prefix + key: literal_eval(shape) for key, shape in listed}
    # The published files hold the tied embedding once, under the name of the language head.
    del expected[f"{prefix}paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"]
    saved = LAYOUTS[layout].save(full_size.state_dict())
    assert {key: tuple(value.shape) for key, value in saved.items()} == expected
    assert len(saved) == 812


def test_without_the_unused_head_it_still_writes_whole_checkpoints():
    config = tiny_config(expert_lm_head=False)
    source, target = Model(config), Model(replace(config, expert_lm_head=True))
    saved = LAYOUTS["openpi"].save(source.state_dict())
    assert saved["paligemma_with_expert.gemma_expert.lm_head.weight"].eq(0).all()
    load_official(target, LAYOUTS, saved)
    account = load_official(source, LAYOUTS, saved)
    assert "paligemma_with_expert.gemma_expert.lm_head.weight" in account.unused


def tiny_config(**changes) -> ModelConfig:
    tower = {"depth": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8}
    config = ModelConfig(
        vision=SiglipConfig(width=16, depth=1, num_heads=2, mlp_dim=24, patch_size=4),
        language=GemmaConfig(width=24, mlp_dim=32, **tower),
        expert=GemmaConfig(width=16, mlp_dim=24, **tower),
        vocab_size=50, image_size=8, num_images=2, max_token_len=16, action_horizon=5, max_action_dim=6,
    )  # fmt: skip
    return replace(config, **changes)


# ------------------------------------------------------------------------------------------- masks and trims


def test_the_loss_is_pure(model, inputs):
    (first, gradients), (second, again) = run(model, *inputs), run(model, *inputs)
    assert torch.equal(first, second)
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@pytest.mark.parametrize("garbage", [123.0, float("nan")])
def test_garbage_in_padded_actions_changes_no_bit(model, inputs, garbage):
    batch, draw = inputs
    batch["action_mask"][1, 3:] = False  # steps beyond the episode's end
    dirty = Batch(batch, actions=batch["actions"].masked_fill(~batch["action_mask"], garbage))
    (clean_loss, clean), (dirty_loss, other) = run(model, batch, draw), run(model, dirty, draw)
    assert torch.equal(clean_loss, dirty_loss)
    assert all(torch.equal(clean[name], other[name]) for name in clean)


def test_garbage_in_masked_views_and_padded_prompts_changes_no_bit(model, inputs):
    batch, draw = inputs
    dirty = Batch(
        batch,
        images=torch.where(batch["image_mask"][:, :, None, None, None], batch["images"], torch.tensor(50.0)),
        tokens=batch["tokens"].masked_fill(~batch["token_mask"], 77),
    )
    assert not torch.equal(dirty["images"], batch["images"]) and not torch.equal(dirty["tokens"], batch["tokens"])
    clean, other = model(batch, draw), model(dirty, draw)
    assert torch.equal(clean.total(), other.total())
    assert torch.equal(clean.details["velocity"], other.details["velocity"])


def test_trims_leave_loss_and_gradients_as_they_are(golden, model, inputs):
    batch, draw = inputs
    batch["image_mask"][:, 1] = False  # a camera that no sample has, between two that are there
    batch["token_mask"][:, 5:] = False
    trims = [replace(trim, multiple=1) for trim in model.contract(golden.config).trims]
    short = trimmed(batch, trims)
    assert short["images"].shape[1] == 2 and short["tokens"].shape[1] == 5
    (whole, gradients), (cut, other) = run(model, batch, draw), run(model, short, draw)
    torch.testing.assert_close(whole, cut, atol=0, rtol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-6, rtol=1e-4)


def test_samples_do_not_see_each_other(model, inputs):
    batch, draw = inputs
    alone = [model(Batch({k: v[i : i + 1] for k, v in batch.items()}), Draw({k: v[i : i + 1] for k, v in draw.items()}))
             for i in range(2)]  # fmt: skip
    together = model(batch, draw)
    for i, single in enumerate(alone):
        for name in ("velocity", "target"):
            torch.testing.assert_close(single.details[name][0], together.details[name][i], atol=1e-5, rtol=1e-5)
    total = sum(single.terms["flow"].sum for single in alone) / sum(single.terms["flow"].count for single in alone)
    torch.testing.assert_close(total, together.total(), atol=0, rtol=1e-6)


def test_a_sample_without_any_prefix_stays_finite(model, inputs):
    batch, draw = inputs
    batch["image_mask"][0], batch["token_mask"][0] = False, False
    loss, gradients = run(model, batch, draw)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients.values())


def test_counts_need_no_forward(model, inputs):
    batch, draw = inputs
    batch["action_mask"][0, 2:] = False
    assert model.counts(batch)["flow"] == model(batch, draw).terms["flow"].count == batch["action_mask"].sum()


def test_a_missing_mask_is_an_error(model, inputs):
    batch, draw = inputs
    del batch["action_mask"]
    with pytest.raises(KeyError, match="action_mask"):
        model(batch, draw)


# ------------------------------------------------------------------------------------------- sampling


def test_one_euler_step_is_the_velocity_that_training_predicts(model, inputs):
    """The cached prefix gives what the joint forward gives: at t = 1 the noisy action is the noise itself."""
    batch, draw = inputs
    at_noise = Batch(batch, action_mask=torch.ones_like(batch["action_mask"]))
    velocity = model(at_noise, Draw(noise=draw["noise"], time=torch.ones(2))).details["velocity"]
    actions = model.act(batch, Draw(noise=draw["noise"]), steps=1)
    torch.testing.assert_close(actions, draw["noise"] - velocity, atol=1e-5, rtol=1e-5)
    assert not actions.requires_grad


def test_sampling_reads_no_targets(model, golden, inputs):
    batch, draw = inputs
    fields = golden.config and Model.contract(golden.config).fields
    observation = Batch({name: batch[name] for name, field in fields.items() if field.observation})
    assert set(observation) == {"images", "image_mask", "tokens", "token_mask"}
    assert torch.equal(model.act(observation, draw, 2), model.act(batch, draw, 2))


# ------------------------------------------------------------------------------------------- parts


def test_towers_hold_every_parameter_once(model):
    held = [p for paths in model.towers().values() for path in paths for p in model.get_submodule(path).parameters()]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


def test_blocks_exist_and_are_of_one_class(model):
    for group in model.blocks():
        assert {type(block) for block in group.modules(model)} == {type(group.modules(model)[0])}


def test_what_nothing_reads_is_not_trained(model, inputs):
    _, gradients = run(model, *inputs)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(gradients)
    last = "layers.2.language."
    assert {name.removeprefix(last) for name in gradients if name.startswith(last)} == {
        "input_norm.weight", "qkv.k_proj.weight", "qkv.v_proj.weight",
    }  # fmt: skip
    assert "norm.weight" not in trained and "expert_lm_head.weight" not in trained


@pytest.mark.parametrize("option, frozen", [("freeze_vision_encoder", ("vision",)),
                                            ("train_expert_only", ("vision", "projector", "language"))])  # fmt: skip
def test_freezing_options(option, frozen):
    model = Model(tiny_config(**{option: True}))
    for tower, paths in model.towers().items():
        trains = any(p.requires_grad for path in paths for p in model.get_submodule(path).parameters())
        assert trains == (tower not in frozen)


def test_a_frozen_vision_tower_can_run_ahead():
    torch.manual_seed(0)
    model = Model(tiny_config(freeze_vision_encoder=True))
    contract = model.contract(model.config)
    batch, draw = contract.synthetic(2), make_draw(contract.draws, range(2), seed=0, epoch=0)
    ahead = model.encode_frozen(batch)
    assert "images" not in ahead and not ahead["image_features"].requires_grad
    assert torch.equal(model(ahead, draw).total(), model(batch, draw).total())
    trains = Model(tiny_config())
    assert trains.encode_frozen(batch) is batch


def test_bf16_keeps_the_islands_and_stays_close(golden, model, inputs):
    low = golden.model()
    golden.load(low)
    to_bfloat16(low)
    kept = {name for name, p in low.named_parameters() if p.dtype == torch.float32}
    assert all(any(fnmatchcase(n, f"{pattern}*") for pattern in low.keep_fp32()) for n in kept)
    assert "vision.patch.weight" in kept and "layers.1.expert.post_norm.dense.weight" in kept
    assert low.layers[0].language.mlp.gate_proj.weight.dtype == torch.bfloat16
    loss, gradients = run(low, *inputs)
    exact, _ = run(model, *inputs)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0, rtol=1e-2)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_the_loss_neither_waits_for_the_device_nor_depends_on_values_for_its_shapes(inputs):
    """Fake tensors have no values: reading one, or a shape made from one, raises."""
    with FakeTensorMode() as mode:
        model = Model(tiny_config())
        contract = model.contract(model.config)
    batch, draw = contract.synthetic(3), make_draw(contract.draws, range(3), seed=0, epoch=0)
    fake = [type(x)({name: mode.from_tensor(value) for name, value in x.items()}) for x in (batch, draw)]
    with mode:
        model(*fake).total().backward()
        assert model.act(*fake, steps=2).shape == (3, 5, 6)


def test_the_contract_states_what_the_model_takes():
    torch.manual_seed(0)
    config = tiny_config()
    model, contract = Model(config), Model.contract(config)
    batch, draw = contract.synthetic(2), make_draw(contract.draws, [5, 9], seed=1, epoch=0)
    contract.check(batch)
    assert model(batch, draw).total().isfinite()
    batch["images"] = torch.zeros(2, 2, 33, 47, 3, dtype=torch.uint8)  # raw frames may have any size
    contract.check(batch)
    assert model(batch, draw).total().isfinite()
    batch["images"] = torch.zeros(2, 3, 8, 8, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="images"):
        contract.check(batch)
    times = make_draw(contract.draws, range(500), seed=0, epoch=0)["time"]
    assert times.min() >= 0.001 and times.max() <= 1.0 and 0.55 < times.mean() < 0.65  # Beta(1.5, 1): mean 0.6


@pytest.mark.parametrize("changes, message", [
    ({"expert": GemmaConfig(width=16, depth=3, mlp_dim=24, num_heads=4, num_kv_heads=1, head_dim=8)}, "depth"),
    ({"image_size": 10}, "multiple of vision.patch_size"),
    ({"action_dim": 7}, "between 1 and model.max_action_dim"),
    ({"vision": SiglipConfig(width=15, depth=1, num_heads=2, mlp_dim=24, patch_size=4)}, "does not divide"),
])  # fmt: skip
def test_configurations_that_cannot_work(changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)
