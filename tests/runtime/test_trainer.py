"""The life of a run: skipped steps, signals, faults of the outside, evaluation, logs, and programs of one's own."""

import json
import math
import os
import signal
import sys
import types

import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.data.readers.lerobot.reader import LeRobotReader
from vlaforge.runtime import programs
from vlaforge.runtime.checkpoint import files, formats
from vlaforge.runtime.process import locked
from vlaforge.runtime.programs import FinetuneTrainer, program


def registered(monkeypatch, cls):
    """Makes `cls` a program that an installed package registers."""
    entry = types.SimpleNamespace(name=cls.__name__, load=lambda: cls)
    monkeypatch.setattr(programs, "entry_points", lambda group: [entry] if group == programs.ENTRY_POINTS else [])
    return ["--trainer-type", cls.__name__]


class Poison(FinetuneTrainer):
    """NaN targets in the micro-batches whose numbers are in `at` (from 1)."""

    at = {4}

    def __init__(self):
        self.seen = 0

    def losses(self, model, minibatch):
        self.seen += 1
        if self.seen in self.at:
            minibatch.batch["actions"][minibatch.batch["action_mask"]] = float("nan")
        return super().losses(model, minibatch)


# ------------------------------------------------------------------------------------------ guards


def test_a_poisoned_step_is_skipped_counted_and_told(runs, monkeypatch):
    flags = registered(monkeypatch, Poison)
    trainer = runs(*flags, "--save-interval", "3")
    rows = runs.rows(trainer)
    assert [row["skipped"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert rows[3]["loss"] is None and all(math.isfinite(rows[n]["loss"]) for n in (0, 1, 2, 4, 5))
    assert rows[3]["nonfinite"] == 1 and rows[3]["in_a_row"] == 1 and rows[4]["in_a_row"] == 0
    told = next(note for note in runs.hooks.notes if "step 4: 1 skipped" in note)
    cursor = trainer.parts.feed.schedule.order.slice(0, 6, 8)[0]
    rows_of_four = [trainer.setup.dataset.row_id(int(position)) for position in cursor]
    assert f"Dataset rows: {rows_of_four[0]}, {rows_of_four[1]}." in told
    state = json.loads((trainer.checkpoint / "state.json").read_text())
    assert state["iteration"] == 6 and state["guard"]["skipped"] == 1
    steps = {float(value) for name, value in formats.read(trainer.checkpoint, "optim").items() if "step." in name}
    assert steps == {5.0}


def test_too_many_skipped_steps_stop_the_run(runs, monkeypatch):
    monkeypatch.setattr(Poison, "at", {3, 4, 5, 6})
    flags = registered(monkeypatch, Poison)
    with pytest.raises(UserError, match="last 2 steps up to step 4 were refused"):
        runs(*flags, "--stop-after-skipped", "2", "--save-interval", "2", into="x")
    held = runs.folder / "x" / "checkpoints" / "steps_2"
    assert files.fault(held) is None


def test_ranks_that_read_the_same_are_stopped():
    from vlaforge.data.schema import Batch, Draw, Minibatch
    from vlaforge.runtime.ranks import Ranks
    from vlaforge.runtime.reporter import check_distinct

    class Two(Ranks):
        world = 2

        def gather(self, value):
            return [value, self.other]

    ranks, mine = Two(), [Minibatch(Batch(), Draw(), torch.tensor([4, 9]))]
    ranks.other = [9, 5]
    check_distinct(ranks, mine)
    ranks.other = [4, 9]
    with pytest.raises(UserError, match="Ranks 0 and 1 read the same 2 samples"):
        check_distinct(ranks, mine)


# ------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_checkpoints_and_leaves(runs, name):
    from vlaforge.runtime.hooks import Hooks

    class Kill(Hooks):
        def logged(self, step, metrics):
            if step == 3:
                os.kill(os.getpid(), getattr(signal, name))

    whole = runs()
    before = signal.getsignal(signal.SIGTERM)
    stopped = runs(into="x", hooks=Kill())
    assert stopped.stopped == name and stopped.completed == 3
    assert stopped.checkpoint.name == "steps_3" and files.fault(stopped.checkpoint) is None
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = runs("--resume", into="x")
    assert runs.losses(resumed) == runs.losses(whole)


def test_a_vanished_file_ends_in_one_sentence(runs, monkeypatch):
    read = LeRobotReader.get_many
    calls = []

    def gone(self, positions, needs):
        calls.append(positions)
        if len(calls) > 4:
            raise FileNotFoundError(2, "No such file or directory", "videos/file-000.mp4")
        return read(self, positions, needs)

    monkeypatch.setattr(LeRobotReader, "get_many", gone)
    with pytest.raises(UserError) as caught:
        runs("--save-interval", "2", into="x")
    text = str(caught.value)
    for words in ("stopped after step 4", "file-000.mp4", "episode", "steps_4; continue with --resume"):
        assert words in text
    assert "\n" not in text
    monkeypatch.setattr(LeRobotReader, "get_many", read)
    assert runs("--resume", into="x").completed == 6


@pytest.mark.parametrize("mode", ["--async-save", "--no-async-save"])
def test_a_full_disk_ends_in_one_sentence(runs, monkeypatch, mode):
    write = files.Sink.write

    def full(self, data):
        if "steps_4" in str(self.file.name) and self.size > 1000:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(files.Sink, "write", full)
    with pytest.raises(UserError, match=r"disk of .* is full.*last whole checkpoint is steps_2"):
        runs("--save-interval", "2", mode, into="x")
    held = sorted(path.name for path in (runs.folder / "x" / "checkpoints").iterdir())
    assert held == ["last", "steps_2"] and files.fault(runs.folder / "x" / "checkpoints" / "steps_2") is None


def test_full_disk_under_the_log(runs, monkeypatch):
    from vlaforge.runtime.metrics import MetricsFile

    def full(self, row):
        if row["step"] == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsFile, "write", full)
    with pytest.raises(UserError, match=r"stopped after step 3: the disk of .* is full"):
        runs(into="x")


def test_one_run_at_a_time_in_a_folder(tmp_path, runs):
    with locked(tmp_path / "x"), pytest.raises(UserError, match="Another run is writing to"):
        runs(into="x")
    assert runs("--train-iters", "1", into="x").completed == 1


# ------------------------------------------------------------------------------------------ logs


def test_rows_hold_what_they_should(runs):
    trainer = runs("--lr-group", "expert=1e-4:2e-5", "--detail-log-interval", "3", "--timing-log-level", "1")
    rows = runs.rows(trainer)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    wanted = {"loss", "lr", "grad_norm", "samples_per_s", "data_wait", "step_time_s", "samples", "epoch", "memory_gib"}
    assert all(wanted <= set(row) for row in rows)
    assert [row["samples"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert rows[1]["lr/expert"] == pytest.approx(5e-5) and rows[1]["lr/base"] == rows[1]["lr"]
    for row in rows:
        total = math.hypot(row["grad_norm/expert"], row["grad_norm/base"])
        assert total == pytest.approx(row["grad_norm"], rel=1e-5)
        assert 0.0 <= row["data_wait"] <= 1.0 and row["samples_per_s"] > 0
    timed = [row["step"] for row in rows if "time/forward" in row]
    assert timed == [3, 6] and {"time/backward", "time/optimizer", "time/clip"} <= set(rows[2])
    assert sum(note.startswith("stages: ") for note in runs.hooks.notes) == 2
    assert runs.hooks.rows[-1]["step"] == 6


def test_rates_and_utilisation(runs, monkeypatch):
    """Tokens from the batch's shapes; MFU is counted FLOPs over time and peak, in proportion to the tokens that are
    left after trimming."""
    from dataclasses import replace

    from vlaforge.graphs.devices import KINDS

    kind = replace(KINDS["cpu"], fp32=1e12)
    monkeypatch.setitem(KINDS, "cpu", kind)
    lora = runs("--train-iters", "1", "--use-lora", "--lora-target-modules", "expert").meter.work
    trainer = runs("--detail-log-interval", "0")
    work, rows = trainer.meter.work, runs.rows(trainer)
    config = trainer.setup.model_config
    full = 2 * (config.num_images * config.image_tokens + config.max_token_len + config.action_horizon)
    assert work.tokens == full and work.peak == 1e12 and 1e6 < lora.flops < work.flops
    for row in rows:
        tokens = row["tokens_per_s"] * row["step_time_s"]
        assert 0 < tokens <= full * 1.0001
        assert row["mfu"] == pytest.approx(work.flops * tokens / full / row["step_time_s"] / 1e12, rel=1e-6)


def test_log_interval_and_own_loss(runs):
    trainer = runs("--log-interval", "4", "--detail-log-interval", "0", "--loss-log-rank", "0")
    rows = runs.rows(trainer)
    assert [row["step"] for row in rows] == [4, 6]  # the last step is always logged
    assert all(row["loss/rank0"] == pytest.approx(row["loss"], rel=1e-6) for row in rows)


def test_tensorboard_and_wandb_offline(runs, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trainer = runs("--train-iters", "3", "--tensorboard-dir", "tb", "--wandb-mode", "offline", into="x")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.folder / "tb")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in runs.rows(trainer)]
    offline = list((trainer.folder / "wandb").glob("offline-run-*"))
    assert len(offline) == 1 and list(offline[0].glob("*.wandb"))
    first = (trainer.folder / "wandb_id.txt").read_text()
    runs("--train-iters", "4", "--resume", "--wandb-mode", "offline", into="x")
    assert (trainer.folder / "wandb_id.txt").read_text() == first


def test_wandb_absent_says_how_to_install_it(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'vlaforge\[wandb\]'"):
        runs("--train-iters", "1", "--wandb-mode", "offline")


# ------------------------------------------------------------------------------------------ evaluation


def test_evaluation_uses_the_average_and_marks_the_best(runs):
    flags = ["--eval-episodes", "last:1", "--eval-interval", "2", "--save-interval", "2", "--lr-base", "1e-3"]
    trainer = runs(*flags, "--save-total-limit", "1", "--train-iters", "4")
    rows = runs.rows(trainer)
    found = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert sorted(found) == [2, 4]
    best = min(found, key=found.get)
    checkpoints = trainer.store.folder
    assert (checkpoints / "best").resolve().name == f"steps_{best}"
    assert (checkpoints / "last").resolve().name == "steps_4"
    frozen = runs(*flags, "--train-iters", "4", "--ema-decay", "0.999999")
    slow = [row["eval_loss"] for row in runs.rows(frozen) if "eval_loss" in row]
    # an average that hardly moves evaluates as the start did, whatever the weights do
    assert slow[0] == pytest.approx(slow[1], rel=1e-4) and abs(found[4] - found[2]) > 100 * abs(slow[1] - slow[0])
    assert runs.losses(frozen) == runs.losses(trainer)  # evaluating and averaging change no training


# ------------------------------------------------------------------------------------------ switches


def test_switches(runs, monkeypatch):
    import gc

    plain = runs()
    told = []
    monkeypatch.setattr(gc, "collect", lambda *a: told.append(a))
    other = runs("--deterministic-mode", "--disable-tf32", "--manual-gc", "--manual-gc-interval", "2")
    assert torch.backends.cuda.matmul.allow_tf32 is False and torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    assert len(told) >= 4 and gc.isenabled()
    assert runs.losses(plain) == runs.losses(other)


def test_rehearsal_is_before_the_first_step(runs, monkeypatch):
    runs("--train-iters", "1")
    assert any(note.startswith("Checkpoint rehearsal") for note in runs.hooks.notes)
    write = files.Sink.write
    monkeypatch.setattr(files.Sink, "write", lambda self, data: write(self, bytes(memoryview(data))[::-1]))
    with pytest.raises(UserError, match="does not come back as it was saved"):
        runs("--train-iters", "1", into="x")
    assert not (runs.folder / "x" / "metrics.jsonl").exists()


def test_updates_that_vanish_are_told(runs):
    """At a tiny rate bf16 weights stand still without masters, and the run says so; with masters there is no
    warning."""
    low = ["--dtype", "bfloat16", "--detail-log-interval", "3", "--lr-warmup-iters", "0"]
    trainer = runs(*low, "--no-master-weights", "--lr-base", "1e-6")
    notes = [note for note in runs.hooks.notes if note.startswith("Warning")]
    assert "without fp32 masters" in notes[0] and "of the low-precision weights where they were" in notes[1]
    assert [row["step"] for row in runs.rows(trainer) if row.get("unmoved", 0) > 0.5] == [3, 6]
    runs(*low, "--no-master-weights", "--lr-base", "1e-2")
    assert not any("where they were" in note for note in runs.hooks.notes)
    runs(*low, "--lr-base", "1e-6")
    assert not any(note.startswith("Warning") for note in runs.hooks.notes)


def test_float16_trains_with_a_loss_scale(runs):
    trainer = runs("--dtype", "float16", "--train-iters", "4", "--lr-base", "1e-3")
    rows = runs.rows(trainer)
    assert rows[0]["loss_scale"] >= 1.0 and all(math.isfinite(row["loss"]) for row in rows)
    fp32 = runs.rows(runs("--train-iters", "4", "--lr-base", "1e-3"))
    skipped = rows[-1]["overflows"]
    assert rows[0]["loss"] == pytest.approx(fp32[0]["loss"], rel=2e-2) and rows[-1]["in_a_row"] == 0 and skipped < 4


def test_unknown_program():
    with pytest.raises(UserError, match="did you mean 'FinetuneTrainer'"):
        program("FinetuneTrainr")
