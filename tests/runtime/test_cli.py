"""Every fault of item "errors a user will make", through the real command: one sentence, exit code 2, no trace."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from vlaforge.models import family
from vlaforge.models.convert import Layout
from vlaforge.runtime.commands.run import main, set_aside
from vlaforge.runtime.config import resolve

TINY = ("--model", "pi05", "--preset", "tiny")


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs ``forge-run`` and returns the sentence that it ends with; nothing may have been written."""
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"

    def run(*argv: str) -> str:
        output = () if "--output-dir" in argv else ("--output-dir", str(out))
        assert main([*argv, *output]) == 2
        said = capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err
        lines = said.err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("forge-run: ")
        assert not out.exists()
        return lines[0].removeprefix("forge-run: ")

    return run


@pytest.fixture
def dataset(metaworld, tmp_path) -> Path:
    """A copy of the bundled dataset whose metadata may be changed; the data are linked."""
    copy = tmp_path / "dataset"
    shutil.copytree(metaworld / "meta", copy / "meta")
    for name in ("data", "videos"):
        (copy / name).symlink_to(metaworld / name)
    return copy


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--model", "pi5"), "did you mean 'pi05'"),
        (("--model", "pi05", "--preset", "tyni"), "did you mean 'tiny'"),
        ((*TINY, "--train-iter", "3"), "did you mean '--train-iters'"),
        ((*TINY, "model.action_horizn=3"), "did you mean 'model.action_horizon'"),
        ((*TINY, "data.imagesize=3"), "did you mean 'data.image_size'"),
        ((*TINY, "--train-iters", "0"), "--train-iters is 0: it must be at least 1."),
        ((*TINY, "--per-device-batch-size", "-4"), "--per-device-batch-size is -4: it must be at least 1."),
        ((*TINY, "--dataset-path", "/nowhere"), "'/nowhere' does not exist"),
        ((*TINY, "--tokenizer-path", "/nowhere"), "'/nowhere' is missing"),
        ((*TINY, "--pretrained-checkpoint", "/nowhere"), "'/nowhere' does not exist"),
        ((*TINY, "--resume"), "no whole checkpoint"),
        ((*TINY, "--output-dir", "/proc/vlaforge"), "'/proc/vlaforge' is not writable"),
        ((*TINY, "data.cameras.base_0_rgb=scnee"), "did you mean 'scene'"),
        ((*TINY, "data.cameras.bse_0_rgb=scene"), "did you mean 'base_0_rgb'"),
        ((*TINY, "model.max_action_dim=3"), "4 dimensions, more than the 3 of the model"),
        ((*TINY, "model.action_dim=3"), "the dataset's action has 4 dimensions"),
        ((*TINY, "--lerobotdataset-version", "v2.1"), "v2.1"),
        ((*TINY, "--eval-episodes", "7"), "episode 7"),
        ((*TINY, "--eval-episodes", "last:6"), "leave some to train on"),
        ((*TINY, "--eval-episodes", "last:x"), "last:N"),
        ((*TINY, "--episodes", "0:99"), "no episode"),
        ((*TINY, "--device", "cuda:99"), "cuda:99"),
        ((*TINY, "--device", "gpu"), "auto, cpu, cuda or cuda:N"),
        ((*TINY, "--device-kind", "h20"), "did you mean 'h200'"),
        ((*TINY, "--without", "fuze"), "fuze"),
    ],
)
def test_what_was_given_cannot_be_used(refused, argv, words):
    assert words in refused(*argv)


def test_no_tokenizer(refused, tmp_path):
    assert "--tokenizer-path" in refused(*TINY, "--tokenizer-path", "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no tokenizer.json" in refused(*TINY, "--tokenizer-path", str(empty))


def test_output_folder_below_a_file(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(*TINY, "--output-dir", str(tmp_path / "file" / "run"))


def test_not_a_dataset(refused, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    assert "photos" in refused(*TINY, "--dataset-path", str(folder))
    assert "No dataset was given" in refused(*TINY, "--dataset-path", "none")


def test_unsupported_version(refused, dataset):
    edit(dataset / "meta" / "info.json", lambda info: info.update(codebase_version="v9.9"))
    sentence = refused(*TINY, "--dataset-path", str(dataset))
    assert "v9.9" in sentence and "v3.0" in sentence


def test_statistics_of_another_robot(refused, dataset):
    def shorten(stats):
        stats["action"] = {name: values[:3] for name, values in stats["action"].items()}

    edit(dataset / "meta" / "stats.json", shorten)
    sentence = refused(*TINY, "--dataset-path", str(dataset))
    assert "3 values" in sentence and "4 dimensions" in sentence


def test_nearly_constant_dimension_stops_the_run_unless_allowed(dataset, metaworld, tmp_path, capsys):
    """One joint that stays at 1.569 ± 0.0005 would turn an ordinary value into a huge one."""
    (dataset / "data").unlink()
    table = pq.read_table(metaworld / "data" / "chunk-000" / "file-000.parquet")
    state = np.stack(table["observation.state"].to_numpy())
    state[:, 2] = 1.569 + 5e-4 * np.sin(np.arange(len(state)))
    column = table.column_names.index("observation.state")
    values = pa.array(list(state), table.schema.field("observation.state").type)
    table = table.set_column(column, table.schema.field("observation.state"), values)
    (dataset / "data" / "chunk-000").mkdir(parents=True)
    pq.write_table(table, dataset / "data" / "chunk-000" / "file-000.parquet")
    run = (*TINY, "--dataset-path", str(dataset), "--output-dir", str(tmp_path / "out"))
    assert main(run) == 2
    said = capsys.readouterr().err
    assert "state dimension 2 'z'" in said and "hardly moves" in said and "--allow-extreme-norm" in said
    assert "near-constant" in said, "the table is shown"
    assert main([*run, "--allow-extreme-norm", "--dry-run"]) == 0
    assert "hardly moves" in capsys.readouterr().out


@pytest.fixture(scope="module")
def official() -> dict[str, torch.Tensor]:
    """A tiny pi05 checkpoint in the OpenPI layout."""
    config = resolve(TINY).model_config
    layout: Layout = family("pi05").part("convert").LAYOUTS["openpi"]
    return {key: value.contiguous() for key, value in layout.save(family("pi05").model(config).state_dict()).items()}


def checkpoint(tensors: dict[str, torch.Tensor], path: Path) -> str:
    save_file({key: value.clone() for key, value in tensors.items()}, path)
    return str(path)


def test_checkpoint_that_does_not_fit(refused, official, tmp_path):
    gone = "action_out_proj.bias"
    path = checkpoint({k: v for k, v in official.items() if k != gone}, tmp_path / "a.safetensors")
    assert f"1 missing ({gone})" in refused(*TINY, "--pretrained-checkpoint", path)

    path = checkpoint({**official, "action_extra.weight": torch.zeros(2)}, tmp_path / "b.safetensors")
    assert "1 unexpected (action_extra.weight)" in refused(*TINY, "--pretrained-checkpoint", path)

    sentence = refused(*TINY, "--pretrained-checkpoint", path, "model.expert.mlp_dim=128")
    assert "of another shape" in sentence and "expert.mlp" in sentence

    path = checkpoint({"something": torch.zeros(1)}, tmp_path / "c.safetensors")
    assert "something" in refused(*TINY, "--pretrained-checkpoint", path)

    (tmp_path / "d.safetensors").write_bytes(b"not safetensors at all")
    assert "no whole safetensors file" in refused(*TINY, "--pretrained-checkpoint", str(tmp_path / "d.safetensors"))


def test_our_own_checkpoint_that_does_not_fit(refused, tmp_path):
    state = family("pi05").model(resolve(TINY).model_config).state_dict()
    gone = next(iter(state))
    path = checkpoint({k: v for k, v in state.items() if k != gone}, tmp_path / "model.safetensors")
    assert f"1 missing ({gone})" in refused(*TINY, "--pretrained-checkpoint", path)


# ------------------------------------------------------------------------------------------------- what works


@pytest.fixture
def accepted(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "cache"))

    def run(*argv: str) -> str:
        assert main([*argv, "--output-dir", str(tmp_path / "out")]) == 0
        said = capsys.readouterr()
        assert said.err == "" and not (tmp_path / "out").exists()
        return said.out

    return run


def test_dry_run_checks_everything_and_estimates_the_memory(accepted, official, tmp_path):
    path = checkpoint(official, tmp_path / "model.safetensors")
    said = accepted(*TINY, "--dry-run", "--pretrained-checkpoint", path, "--dtype", "bfloat16")
    checks = ("dataset", "cameras", "tokenizer", "statistics", "normalisation", "model", "checkpoint", "first sample")
    for check in checks:
        assert f"ok    {check}" in said
    for part in ("weights", "gradients", "optimiser", "activations", "total", "available"):
        assert f"{part} " in said and "GiB" in said
    assert "held out: episode 5" in said and "loaded" in said


def test_dry_run_advises_when_it_will_not_fit(accepted):
    said = accepted(*TINY, "--dry-run", "--device-kind", "a100", "--per-device-batch-size", "100000")
    assert "halve --per-device-batch-size to 50000" in said


def test_print_config_can_be_given_back(accepted, tmp_path):
    said = accepted(
        "data.image_size=32", *TINY, "--compile", "model.image_size=32", "--lr-base", "1e-4", "--print-config"
    )
    path = tmp_path / "config.yaml"
    path.write_text(said)
    again = accepted("--config-file", str(path), "--print-config")

    def values(text):
        return [line.split("  #")[0].rstrip() for line in text.splitlines()]

    assert values(again) == values(said)
    assert "lr_base: 0.0001" in said and "# --lr-base" in said and "# tiny.yaml" in said


def test_plan_needs_no_data(accepted):
    said = accepted(*TINY, "--plan", "--dataset-path", "/nowhere", "--without", "trim_tokens")
    assert "forge plan" in said and "trim_tokens" in said


def test_help_names_flags_and_the_models_settings(accepted):
    said = accepted("--model", "pi05", "--preset", "tiny", "--help")
    assert "--per-device-batch-size" in said and "model.action_horizon = 16" in said


def test_recipes_reproduce_the_published_settings_and_say_so(accepted):
    for name, decay, dims in (("lerobot", 0.01, "real"), ("openpi", 1e-10, "all")):
        done = resolve(["--model", "pi05", "--recipe", name])
        assert (done.args.weight_decay, done.data_config.loss_dims) == (decay, dims)
        assert done.data_config.pad_steps == "train"
        assert f"Recipe {name}" in done.notes[0] and f"data.loss_dims={dims}" in done.notes[0]
    assert resolve(["--model", "pi05"]).data_config.pad_steps == "mask"
    alone = resolve(["--model", "pi05", "data.loss_dims=all"])
    assert alone.data_config.loss_dims == "all" and alone.data_config.pad_steps == "mask"
    assert "Recipe lerobot" in accepted(*TINY, "--recipe", "lerobot", "--dry-run")


def test_as_a_real_process(tmp_path):
    """The installed command, from the repository's root: exit code 2 and one line on stderr; 0 and help."""
    command = Path(sys.executable).with_name("forge-run")
    root = Path(__file__).resolve().parents[2]

    def run(*argv: str):
        return subprocess.run([command, *argv], cwd=root, capture_output=True, text=True, timeout=300)

    wrong = run("--model", "pi5")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "forge-run: Unknown model 'pi5': did you mean 'pi05'?\n"
    helped = run("--help")
    assert helped.returncode == 0 and "--train-iters" in helped.stdout and helped.stderr == ""


def test_a_former_run_is_set_aside_whole(tmp_path):
    for name in ("metrics.jsonl", "loss.png"):
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine.txt").write_text("kept")
    moved = set_aside(tmp_path)
    assert sorted(path.name for path in moved.iterdir()) == ["checkpoints", "loss.png", "metrics.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [moved.name, "mine.txt"]
    assert set_aside(tmp_path) is None
    (tmp_path / "log.txt").write_text("")
    assert set_aside(tmp_path) not in (None, moved)


def test_the_table_of_flags_is_current(root):
    page = runpy.run_path(str(root / "docs" / "generate.py"))
    from vlaforge.runtime.args import TrainingArgs

    assert (root / "docs" / "flags.md").read_text() == page["markdown"](TrainingArgs, page["HEAD"]), "run `make docs`"
