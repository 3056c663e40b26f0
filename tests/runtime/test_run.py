"""A whole run through the command: what it says, and what it leaves."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from vlaforge.runtime.commands.run import main
from vlaforge.runtime.config import resolve

SMALL = ("--model", "pi05", "--preset", "tiny", "--per-device-batch-size", "2", "--num-workers", "0",
         "--video-backend", "pyav", "--lr-warmup-iters", "1", "--eval-episodes", "0,5", "--no-save-rehearsal",
         "model.vision.depth=1", "model.language.depth=1", "model.expert.depth=1",
         "model.num_inference_steps=2")  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory, module_capture):
    """(folder, what was printed) of a run of 6 steps."""
    folder = tmp_path_factory.mktemp("run") / "out"
    code, said = module_capture(*SMALL, "--train-iters", "6", "--eval-interval", "3", "--output-dir", str(folder))
    assert code == 0
    return folder, said


@pytest.fixture(scope="module")
def module_capture():
    import contextlib
    import io

    def run(*argv: str) -> tuple[int, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = main(argv)
        return code, out.getvalue()

    return run


def test_it_says_what_it_does(finished):
    folder, said = finished
    assert "held out: episode 0, 5" in said and "forge plan" in said and "max |z|" in said
    assert "open loop before training" in said and "step 3: open-loop error" in said
    assert "step 1/6 · loss" in said and "step 6/6 · loss" in said and "samples/s · data wait" in said
    assert "left" in said and "The trained model's error is" in said
    pictures, texts = ("loss.png", "openloop.png"), ("openloop.json", "report.html", "metrics.jsonl", "config.yaml")
    for name in (*pictures, *texts, "log.txt", "plan.txt"):
        assert str(folder / name) in said and (folder / name).stat().st_size > 0
    assert str(folder / "checkpoints" / "steps_6") in said and (folder / "checkpoints" / "steps_6").is_dir()
    assert said.strip() in (folder / "log.txt").read_text()
    assert (folder / "plan.txt").read_text().strip() in (folder / "log.txt").read_text()
    assert json.loads((folder / "plan.json").read_text())["passes"]


def test_metrics_are_one_row_a_step(finished):
    rows = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "lr", "grad_norm", "samples_per_s", "data_wait"):
        assert all(isinstance(row[name], (int, float)) for row in rows), name
    assert [("eval_error" in row) for row in rows] == [False, False, True, False, False, True]


def test_open_loop_numbers_and_pictures(finished):
    folder = finished[0]
    result = json.loads((folder / "openloop.json").read_text())
    assert result["episodes"] == [0, 5] and result["conditions"]["steps"] == 6
    assert list(result["trained"]["per_dimension"]) == ["x", "y", "z", "gripper"]
    assert {"untrained", "mean_action", "trained_over_untrained", "trained_over_mean_action"} <= set(result)
    for name in ("loss.png", "speed.png", "openloop.png"):
        with Image.open(folder / name) as picture:
            picture.verify()
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "forge plan" in page and "per_device_batch_size" in page


def test_the_saved_configuration_is_the_runs_own(finished):
    folder = finished[0]
    again = resolve(["--config-file", str(folder / "config.yaml")])
    first = resolve([*SMALL, "--train-iters", "6", "--eval-interval", "3"])
    assert again.digest() == first.digest() and again.args.output_dir == str(folder)


def test_a_second_run_leaves_the_first_aside_and_a_resumed_one_adds_to_it(finished, module_capture, tmp_path):
    run = (*SMALL, "--output-dir", str(tmp_path), "--eval-episodes", "5")
    assert module_capture(*run, "--train-iters", "1")[0] == 0
    before = json.loads((tmp_path / "openloop.json").read_text())["untrained"]
    code, said = module_capture(*run, "--train-iters", "2", "--resume")
    assert code == 0 and "Resuming from" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "openloop.json").read_text())["untrained"] == before
    code, said = module_capture(*run, "--train-iters", "1")
    former = next(tmp_path.glob("former-*"))
    assert code == 0 and f"it is now in {former}" in said
    assert len((former / "metrics.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_lowered_and_plain_model_are_compared(module_capture, tmp_path):
    run = (*SMALL, "--output-dir", str(tmp_path), "--train-iters", "1", "--eval-episodes", "none")
    code, said = module_capture(*run, "--verify-compile", "2", "--profile", "1:1")
    assert code == 0 and "plain and lowered model, same weights" in said and "within 0.001 (loss)" in said
    assert (tmp_path / "profiler" / "rank0_steps_1-1.json").stat().st_size > 0
    assert "open loop" not in said and not (tmp_path / "openloop.json").exists()
