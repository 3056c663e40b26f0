"""FastWAM's data: frames, actions and prompts of the bundled dataset, and caches that give the very same losses."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlaforge.data.cache import FeatureCache, verify
from vlaforge.data.cache_writer import CacheWriter
from vlaforge.data.collate import collate
from vlaforge.data.errors import UserError
from vlaforge.data.schema import ACTION, ACTION_IS_PAD, IMAGES, STATE, TASK, Batch, make_draw, sample_rng
from vlaforge.models.fastwam.processing import Processing, join_on_canvas
from vlaforge.models.fastwam.text_cache import OfficialTextCache
from vlaforge.models.video.canvas import compose
from vlaforge.runtime.commands.data import main as forge_data
from vlaforge.runtime.config import resolve
from vlaforge.runtime.setup import Setup, build_setup

CACHED = ("model.video_source=latents", "model.text_source=context")
WORDS = ("--model", "fastwam", "--preset", "tiny", "--episodes", "0,1", "--num-workers", "0")


def setup_of(*words: str) -> Setup:
    return build_setup(resolve([*WORDS, "--eval-episodes", "last:1", *words]))


@pytest.fixture(scope="module")
def online() -> Setup:
    """From pixels and tokens: episode 0 trains, episode 1 is held out."""
    return setup_of()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Caches of both episodes, written by the command."""
    folder = tmp_path_factory.mktemp("caches") / "cache"
    assert forge_data(["precompute", *WORDS, "--output", str(folder), "--shard-rows", "50"]) == 0
    return folder


def read(setup: Setup, position: int) -> dict:
    return setup.dataset.get(position, setup.processing.needs())


def remade(setup: Setup, data: dict | None = None, info: dict | None = None, **model) -> Processing:
    """The setup's processing with other settings."""
    return Processing(
        replace(setup.model_config, **model), replace(setup.data_config, **(data or {})), setup.normalizers,
        setup.tokenizer, replace(setup.dataset.info, **(info or {})),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- samples


def test_a_sample_has_the_frames_and_actions_that_it_says(online):
    needs, raw = online.processing.needs(), read(online, 10)
    assert needs.image_offsets == (0, 4, 8, 12, 16) and needs.action_offsets == tuple(range(16))
    fields = online.processing.sample(raw, sample_rng(0, 0, 10, "augment"), True)
    online.contract.check({name: torch.from_numpy(value)[None] for name, value in fields.items()})
    for view, camera in enumerate(("scene", "wrist")):
        assert np.array_equal(fields["images"][view], raw[IMAGES + camera])
    assert fields["frame_mask"].all() and fields["action_mask"][:, :4].all() and not fields["action_mask"][:, 4:].any()
    actions = online.processing.actions(fields["actions"], raw)
    np.testing.assert_allclose(actions, raw[ACTION], atol=1e-5)
    assert fields["state"].shape == (8,) and not fields["state"][4:].any()


def test_padding_at_the_end_of_an_episode(online):
    """Frames and steps beyond the end are masked; displacements are zero there, other dimensions keep their value."""
    last = len(online.dataset) - 6
    raw = read(online, last)
    assert raw[ACTION_IS_PAD].tolist() == [False] * 6 + [True] * 10
    plain = online.processing.sample(raw, sample_rng(0, 0, last, "augment"), True)
    assert plain["frame_mask"].tolist() == [True, True, False, False, False]
    assert not plain["action_mask"][6:].any() and np.array_equal(plain["actions"], plain["action_fill"])
    zeroed = remade(online, {"delta_dims": (0, 1)}).sample(raw, sample_rng(0, 0, last, "augment"), True)
    back = online.processing.actions(zeroed["action_fill"], raw)
    np.testing.assert_allclose(back[6:, :2], 0.0, atol=1e-6)
    np.testing.assert_allclose(back[6:, 2:], np.broadcast_to(raw[ACTION][5, 2:], (10, 2)), atol=1e-5)
    assert np.array_equal(zeroed["actions"][:6], plain["actions"][:6])


def test_normalised_values_are_clamped(online):
    """The gripper does not vary in this episode, so it is 0 whatever comes."""
    raw = {**read(online, 0), STATE: np.full(4, 1e3, np.float32), ACTION: np.full((16, 4), -1e3, np.float32)}
    fields = online.processing.sample(raw, sample_rng(0, 0, 0, "augment"), True)
    assert fields["state"].tolist() == [5.0] * 3 + [0.0] * 5 and (fields["actions"][:, :3] == -5.0).all()
    free = remade(online, {"clip": None}).sample(raw, sample_rng(0, 0, 0, "augment"), True)
    assert (free["actions"][:, :3] < -100).all()


def test_prompts(online):
    processing = online.processing
    text = processing.prompt("open the drawer")
    assert text == "A video recorded from a robot's point of view executing the following instruction: open the drawer"
    assert processing.prompt(text) == text
    plain, odd = processing.tokens(text), processing.tokens(text.replace(" ", "  ").replace("'", "&#39;"))
    assert np.array_equal(plain["tokens"], odd["tokens"])
    length = int(plain["token_mask"].sum())
    assert plain["tokens"][length - 1] == online.tokenizer.eos_id and not plain["tokens"][length:].any()


def test_an_observation_acts_as_its_sample_does(online):
    raw = read(online, 20)
    fields = online.processing.sample(raw, sample_rng(0, 0, 20, "augment"), False)
    still = {**raw, IMAGES + "scene": raw[IMAGES + "scene"][0], IMAGES + "wrist": raw[IMAGES + "wrist"][0]}
    seen = online.processing.observe(still)
    model = online.resolved.family.model(online.model_config)
    draw = make_draw(online.contract.draws, [0], seed=0, epoch=0)
    given, recorded = (
        Batch({name: torch.from_numpy(np.ascontiguousarray(value))[None] for name, value in one.items()})
        for one in (seen, fields)
    )
    online.contract.check(given, observation_only=True)
    # Not to the bit: a single frame takes another path through the encoder's convolutions.
    torch.testing.assert_close(model.act(given, draw, 2), model.act(recorded, draw, 2), rtol=1e-4, atol=1e-5)


def test_cameras_of_different_sizes_meet_on_the_canvas():
    generator = np.random.default_rng(0)
    big, little = (generator.integers(0, 256, (3, size, size, 3), np.uint8) for size in (64, 32))
    joined = join_on_canvas([big, little], "row", 32, 64)
    assert joined.shape == (1, 3, 32, 64, 3) and np.array_equal(joined[0, :, :, 32:], little)
    whole = compose(torch.from_numpy(joined)[None], "row", 32, 64)
    alone = compose(torch.from_numpy(big)[None, None], "row", 32, 32)
    assert (whole[..., :32] - alone).abs().max() <= 0.5 / 127.5 + 1e-6  # rounded once to a grey level


@pytest.mark.parametrize(
    "data, info, model, message",
    [
        ({"cameras": {"left": "scen"}}, {}, {}, "scene"),
        ({}, {"cameras": {}}, {}, "at least one camera"),
        ({}, {"state_dim": 0}, {}, "no state"),
        ({"prompt": "do it"}, {}, {}, "must hold {task}"),
        ({}, {}, {"layout": "head_over_wrists", "height": 96}, "three cameras"),
        ({"cache": "/tmp/x"}, {}, {}, "reads pixels and tokens"),
        ({}, {}, {"video_source": "latents"}, "no cache is given"),
        ({"text_cache": "/nowhere"}, {}, {"text_source": "context"}, "is no folder"),
    ],
)
def test_data_that_does_not_fit_is_one_sentence(online, data, info, model, message):
    with pytest.raises(UserError, match=message):
        remade(online, data, info, **model)


def test_a_missing_camera_is_named(online):
    raw = read(online, 0)
    del raw[IMAGES + "wrist"]
    with pytest.raises(UserError, match="no camera 'wrist'"):
        online.processing.sample(raw, sample_rng(0, 0, 0, "augment"), True)


# ---------------------------------------------------------------------------------------------------- caches


def test_from_pixels_and_from_the_cache_come_the_same_losses_bit_for_bit(online, cache):
    cached = setup_of(*CACHED, f"data.cache={cache}")
    assert cached.processing.needs().cameras == () and cached.tokenizer is None
    rows = [0, 1, 40, len(online.dataset) - 5]
    losses, gradients = [], []
    for setup in (online, cached):
        torch.manual_seed(0)
        model = setup.resolved.family.model(setup.model_config)
        samples = [setup.processing.sample(read(setup, r), sample_rng(0, 0, r, "augment"), True) for r in rows]
        batch = collate(samples, setup.contract)
        draw = make_draw(setup.contract.draws, rows, seed=0, epoch=0)
        loss = model.loss(batch, draw).total()
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*losses) and all(torch.equal(a, b) for a, b in zip(*gradients))


def test_a_cache_goes_to_loader_processes(cache):
    processing = pickle.loads(pickle.dumps(setup_of(*CACHED, f"data.cache={cache}").processing))
    (held,) = processing.caches
    assert held.row("latents", 3).shape == (48, 2, 4, 8) and held.row("frame_mask", 3).dtype == bool
    with pytest.raises(KeyError, match="no row 100000"):
        held.row("latents", 100_000)
    with pytest.raises(UserError, match="has no text"):
        held.text("context", "another prompt")


@pytest.mark.parametrize(
    "words, message",
    [
        (("model.height=32",), r"size is \[64, 128\] in the cache and \[32, 128\] here"),
        (("model.vae.seed=1",), "weights.seed is 0 in the cache and 1 here"),
        (("data.prompt=Do: {task}",), "'context': prompt is"),
        (("model.text_tokens=64",), "'context': tokens is 80"),
        (("data.cameras.front=wrist",), "cameras is"),
        (("model.video_frames=9",), "frame_offsets is"),
        (("model.encoded_dtype=bfloat16",), "dtype is float32"),
        (("--episodes", "0,1,2"), "episode 2 is not in it"),
    ],
)
def test_a_cache_of_something_else_is_an_error(cache, words, message):
    with pytest.raises(UserError, match=message):
        setup_of(*CACHED, f"data.cache={cache}", *words)


def test_a_cache_of_another_dataset_is_an_error(cache, online, tmp_path):
    copy = shutil.copytree(online.dataset.info.path, tmp_path / "copy")
    assert setup_of(*CACHED, f"data.cache={cache}", "--dataset-path", str(copy)).processing.caches
    (copy / "meta" / "note.txt").write_text("a file more")
    with pytest.raises(UserError, match="whose files are not those of"):
        setup_of(*CACHED, f"data.cache={cache}", "--dataset-path", str(copy))


def test_damage_is_found(cache, tmp_path):
    assert forge_data(["precompute", "--verify", str(cache)]) == 0
    copy = shutil.copytree(cache, tmp_path / "copy")
    shard = copy / "rows-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"rows-00001\.safetensors' is not the file"):
        setup_of(*CACHED, f"data.cache={copy}")
    with pytest.raises(UserError, match="is not the file"):
        verify(copy)
    shard.unlink()
    with pytest.raises(UserError, match=r"lacks its file rows-00001"):
        setup_of(*CACHED, f"data.cache={copy}")
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match="is not finished"):
        setup_of(*CACHED, f"data.cache={copy}")


def test_an_interrupted_run_goes_on_where_whole_files_end(cache, online, tmp_path, capsys):
    """The manifest and the last file are gone, as after a crash; the rest is not made again."""
    copy = shutil.copytree(cache, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").unlink()
    last = max(entry["name"] for entry in manifest["files"] if entry["name"].startswith("rows-"))
    (copy / last).unlink()
    header = {name: manifest[name] for name in ("format", "path", "dataset", "identity")}
    progress = {"header": header, "files": manifest["files"], "prompts": manifest["prompts"]}
    (copy / "progress.json").write_text(json.dumps(progress))
    assert forge_data(["precompute", *WORDS, "--output", str(copy), "--shard-rows", "50"]) == 0
    assert "samples are there already" in capsys.readouterr().out and not (copy / "progress.json").exists()
    setups = [setup_of(*CACHED, f"data.cache={folder}") for folder in (cache, copy)]
    for row in (0, 60, 140):
        one, other = (setup.processing.caches[0].row("latents", row) for setup in setups)
        assert np.array_equal(one, other)
    assert forge_data(["precompute", *WORDS, "--output", str(copy)]) == 2
    assert "already holds a cache" in capsys.readouterr().err


def test_text_alone_can_be_cached(online, tmp_path):
    folder = tmp_path / "text"
    assert forge_data(["precompute", *WORDS, "--output", str(folder), "--fields", "context"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "texts.safetensors"]
    mixed = setup_of("model.text_source=context", f"data.cache={folder}")
    fields = mixed.processing.sample(read(mixed, 0), sample_rng(0, 0, 0, "augment"), True)
    assert "images" in fields and fields["context"].shape == (80, 32)
    with pytest.raises(UserError, match="holds no 'latents'"):
        setup_of(*CACHED, f"data.cache={folder}")


def test_words_of_the_command_that_cannot_be_used(tmp_path, capsys, online):
    inside = online.dataset.info.path / "cache"
    for words, message in (
        (["--output", str(inside)], "inside the dataset"),
        (["--output", str(tmp_path / "x"), "--fields", "latent"], "latents"),
        ([], "--output"),
    ):
        assert forge_data(["precompute", *WORDS, *words]) == 2
        assert message in capsys.readouterr().err
    assert not inside.exists()
    assert forge_data(["precompute", "--model", "pi05", "--preset", "tiny", "--output", str(tmp_path / "y")]) == 2
    assert "no frozen encoders" in capsys.readouterr().err


def test_unknown_weights_are_not_compared(cache, online):
    """A machine that trains from caches need not hold the encoders' weights."""
    spec = online.processing.cache_spec()
    unknown = replace(
        spec, identity={name: {**tree, "weights": None} for name, tree in spec.identity.items() if name != "frame_mask"}
    )
    prompt = online.processing.prompt(str(read(online, 0)[TASK]))
    context, mask = FeatureCache(cache, unknown, ("latents", "context")).text("context", prompt)
    assert np.array_equal(mask, online.processing.tokens(prompt)["token_mask"]) and not context[~mask].any()


def test_the_writer_refuses_folders_of_others(online, tmp_path):
    spec = online.processing.cache_spec()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        CacheWriter(tmp_path, spec, ("context",), online.dataset)
    writer = CacheWriter(tmp_path / "new", spec, ("context",), online.dataset)
    writer.add_texts(["a"], {"context": torch.zeros(1, 80, 32)}, torch.zeros(1, 80, dtype=torch.bool))
    other = replace(spec, identity={**spec.identity, "context": {"prompt": "other"}})
    with pytest.raises(UserError, match="unfinished cache of other content"):
        CacheWriter(tmp_path / "new", other, ("context",), online.dataset)


def test_the_authors_text_caches_are_read(online, tmp_path):
    prompt = online.processing.prompt(str(read(online, 0)[TASK]))
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    context = torch.randn(80, 32, dtype=torch.bfloat16)
    mask = torch.arange(80) < 17
    torch.save({"context": context, "mask": mask}, tmp_path / f"{digest}.t5_len80.wan22ti2v5b.pt")
    processing = remade(online, {"text_cache": str(tmp_path)}, text_source="context")
    fields = processing.sample(read(online, 0), sample_rng(0, 0, 0, "augment"), True)
    assert np.array_equal(fields["context"][:17], context[:17].float().numpy()) and not fields["context"][17:].any()
    assert fields["token_mask"].sum() == 17
    with pytest.raises(UserError, match="has no"):
        OfficialTextCache(tmp_path, 80, 32).text("context", "another")
    with pytest.raises(UserError, match=r"context \[80, 64\]"):
        OfficialTextCache(tmp_path, 80, 64).text("context", prompt)
