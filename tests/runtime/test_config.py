"""Layers of configuration, their origins, and the way there and back through YAML."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from vlaforge.data.errors import UserError
from vlaforge.data.schema import DataConfig
from vlaforge.models import Family
from vlaforge.runtime import config
from vlaforge.runtime.config import SAMPLES, resolve


@dataclass(frozen=True)
class Tower:
    width: int = 8
    heads: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class ToyModel:
    action_dim: int = 7
    rate: float = 0.5
    vision: Tower = field(default_factory=Tower)
    extra: Tower | None = None

    def __post_init__(self) -> None:
        if self.action_dim > 99:
            raise ValueError(f"action_dim is {self.action_dim}; it must be at most 99")


@dataclass(frozen=True)
class ToyData(DataConfig):
    prompt: str = "none"
    size: int = 0


class Toy(Family):
    config = ToyModel
    data_config = ToyData


TINY = """
model:
  action_dim: 4
  vision: {width: 16}
data:
  cameras: {base: scene, wrist: hand}
  size: ${model.vision.width}
train:
  lr_base: 1e-3
  min_lr: 1e-4
  lr_warmup_iters: 10
  dataset_path: ${samples}/metaworld_v30
  tokenizer_path: ${here}/tokenizer.json
"""


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A family `toy` with a preset, a recipe, and a folder of its own."""
    folder = tmp_path / "toy"
    (folder / "recipes").mkdir(parents=True)
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "recipes" / "openpi.yaml").write_text("train: {weight_decay: 1e-10, min_lr: 2e-6}\ndata: {prompt: old}\n")
    monkeypatch.setattr(config, "family", lambda name: Toy("toy", "toy", folder))
    return folder


def tiny(*argv: str):
    return resolve(["--model", "toy", "--preset", "tiny", *argv])


def fault(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_lie_under_the_preset_under_the_file_under_the_command_line(toy, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {lr_base: 2e-3, seed: 5}\nmodel: {rate: 0.25}\n")
    done = tiny("--config-file", str(file), "--seed", "6", "model.vision.width=32")
    assert (done.args.train_iters, done.args.lr_base, done.args.seed) == (150_000, 2e-3, 6)
    assert done.model_config == ToyModel(4, 0.25, Tower(32))
    origin = done.provenance
    assert origin["train.train_iters"] == "default"
    assert origin["model.action_dim"] == "tiny.yaml"
    assert origin["train.lr_base"] == "mine.yaml"
    assert origin["train.seed"] == "--seed"
    assert origin["model.vision.width"] == "command line"
    assert not done.args.was_set("train_iters") and done.args.was_set("seed")


def test_interpolation_sees_what_the_command_line_set(toy):
    assert tiny().data_config.size == 16
    assert tiny("model.vision.width=64").data_config.size == 64


def test_interpolation_reads_the_environment(toy, monkeypatch):
    monkeypatch.setenv("MY_DATA", "/data/mine")
    assert tiny("data.prompt=${oc.env:MY_DATA}").data_config.prompt == "/data/mine"


def test_paths_in_a_preset(toy):
    args = tiny().args
    assert Path(args.dataset_path) == SAMPLES / "metaworld_v30" and Path(args.dataset_path).is_dir()
    assert Path(args.tokenizer_path) == toy / "tokenizer.json"


def test_a_mapping_is_replaced_by_a_file_and_changed_by_a_dotlist(toy, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {cameras: {base: top}}\n")
    assert tiny("--config-file", str(file)).data_config.cameras == {"base": "top"}
    assert tiny("data.cameras.wrist=other").data_config.cameras == {"base": "scene", "wrist": "other"}
    assert tiny("data.cameras={base: top}").data_config.cameras == {"base": "top"}


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("model.rate=1", "rate", 1.0),
        ("model.vision.heads=3,4", "vision", Tower(16, (3, 4))),
        ("model.vision.heads=[5]", "vision", Tower(16, (5,))),
        ("model.extra.width=9", "extra", Tower(9)),
        ("model.action_dim=5.0", "action_dim", 5),
    ],
)
def test_values_take_the_declared_type(toy, text, name, value):
    found = getattr(tiny(text).model_config, name)
    assert found == value and type(found) is type(value)


def test_saved_configuration_reads_back_to_the_same(toy, tmp_path):
    done = tiny("--compile", "--without", "fuse,pack", "model.vision.heads=3,4", "data.prompt=a: b # c", "--fuel", "3")
    path = tmp_path / "saved.yaml"
    done.save(path)
    again = resolve(["--config-file", str(path)])
    assert replace(again.args, config_file=None) == done.args
    assert (again.model_config, again.data_config) == (done.model_config, done.data_config)
    assert again.digest() == done.digest() != tiny().digest()
    assert again.to_yaml(origins=False) == done.to_yaml(origins=False)
    assert "# --compile" in done.to_yaml() and "# tiny.yaml" in done.to_yaml()


def test_one_off_requests_are_not_saved(toy):
    text = tiny("--print-config", "--dry-run", "--resume").to_yaml()
    for name in config.NOT_SAVED:
        assert f"  {name}:" not in text


def test_a_recipe_lies_under_what_you_set_and_says_so(toy):
    done = tiny("--recipe", "openpi", "--weight-decay", "0.1")
    assert (done.args.weight_decay, done.args.min_lr, done.data_config.prompt) == (0.1, 2e-6, "old")
    assert done.provenance["data.prompt"] == "recipe openpi"
    said = " ".join(done.notes)
    assert "train.min_lr=2e-06" in said and "data.prompt=old" in said
    assert "you set train.weight_decay yourself" in said


def test_settings_that_defeat_each_other_are_noted(toy):
    assert any("--lr-warmup-iters 10" in note for note in tiny("--train-iters", "5").notes)
    assert any("--min-lr" in note for note in tiny("--lr-base", "1e-4").notes)
    assert tiny().notes == ()


def test_faults(toy, tmp_path):
    tiny_ = ("--model", "toy", "--preset", "tiny")
    assert "--model with one of" in fault()
    assert "did you mean 'tiny'" in fault("--model", "toy", "--preset", "tyni")
    assert "did you mean 'openpi'" in fault(*tiny_, "--recipe", "openpie")
    assert "did you mean 'data.image_size'" in fault(*tiny_, "data.imagesize=3")
    assert "did you mean 'model.vision.width'" in fault(*tiny_, "model.vision.widht=3")
    assert "data.image_size is 'big': it must be an integer." in fault(*tiny_, "data.image_size=big")
    assert "it must be a mapping to text" in fault(*tiny_, "data.cameras=[1]")
    assert "model.vision.width" in fault(*tiny_, "model.vision=3")
    assert "write --lr-base" in fault(*tiny_, "train.lr_base=1")
    assert "'model.' or 'data.'" in fault(*tiny_, "modle.x=1")
    assert fault(*tiny_, "model.action_dim=0") == "model.action_dim is 0: it must be at least 1."
    assert fault(*tiny_, "model.action_dim=100") == "model.action_dim is 100; it must be at most 99."
    assert "Interpolation key 'nope.x' not found" in fault(*tiny_, "data.image_size=${nope.x}")
    assert "cannot be read" in fault(*tiny_, "--config-file", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trian: {}", "did you mean 'train'"),
        ("train: {lr_bas: 1}", "did you mean 'train.lr_base'"),
        ("train: {seed: x}", "train.seed in bad.yaml is 'x': it must be an integer."),
        ("model: 3", "Section 'model' of bad.yaml"),
        ("model: {vision: {width: wide}}", "model.vision.width in bad.yaml"),
        ("- 1", "must hold the sections"),
        ("model: [1\nx: 2", "not valid YAML at line 2"),
        ("train: {train_iters: 0}", "--train-iters is 0"),
    ],
)
def test_faults_in_a_file(toy, tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert words in fault("--model", "toy", "--preset", "tiny", "--config-file", str(file))


def test_what_nobody_set_stays_open_through_a_saved_file(toy, tmp_path):
    """A saved configuration holds all defaults; read back they are still defaults, for the run to choose by."""
    done = tiny("--seed", "9")
    assert done.args.was_set("seed") and done.args.was_set("lr_base") and not done.args.was_set("video_backend")
    path = tmp_path / "saved.yaml"
    done.save(path)
    again = resolve(["--config-file", str(path)])
    assert again.args.given - {"config_file"} == done.args.given
    assert not again.args.was_set("lerobotdataset_version")
    assert tiny("--video-backend", "torchcodec").args.was_set("video_backend")
    path.write_text("train: {lr_base: 2.5e-5, lr_warmup_iters: 2000}\n")
    back = tiny("--config-file", str(path))
    assert back.args.lr_base == 2.5e-5 and back.provenance["train.lr_base"] == "saved.yaml"
