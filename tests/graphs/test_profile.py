"""The profile: its split adds up, products have their FLOPs, and the page says what was found."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from vlaforge.graphs.check import check_step
from vlaforge.graphs.counters import CompileCounters
from vlaforge.graphs.devices import DeviceKind, measured_cpu
from vlaforge.graphs.profile import ProfileReport, Row, read_profile, stage, write_report
from vlaforge.runtime.commands.profile import main
from vlaforge.runtime.profiler import torch_profiler

CPU = torch.device("cpu")


def step(x, w):
    with stage("data"):
        time.sleep(0.02)
    with stage("forward"):
        loss = nn.functional.gelu(x @ w).sum()
    with stage("backward"):
        loss.backward()


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    x, w = torch.randn(256, 256), torch.randn(256, 256, requires_grad=True)
    step(x, w)
    profiler = torch_profiler(CPU)
    with profiler:
        for _ in range(2):
            step(x, w)
    report = read_profile(profiler, 2, CPU)
    report.check = check_step(lambda: x.sum().item())
    report.conditions, report.plan = {"model": "<two> products"}, "forge plan  & its passes"
    path = write_report(report, tmp_path_factory.mktemp("profile"), "steps_1-2", profiler)
    return report, path


def test_split_adds_up_to_the_step(profiled):
    report, _ = profiled
    assert sum(report.split.values()) == pytest.approx(report.step_s)
    assert 0.02 <= report.split["data"] < report.step_s
    assert {"data", "forward", "backward", "other"} == set(report.split)


def test_products_have_their_flops_and_bytes(profiled):
    """Two steps of three products less one (the input needs no gradient): 2·256³ each, 3·256² floats each."""
    (row,) = [row for row in profiled[0].rows if row.name == "aten::mm"]
    assert row.calls == 4 and row.flops == 4 * 2 * 256**3 and row.bytes == 4 * 3 * 256**2 * 4
    assert row.seconds > 0 and not row.low


def test_roofline_is_the_harder_bound():
    device = DeviceKind("x", "x", bf16=4e9, fp32=1e9, fp8=0, bandwidth=1e9, memory=0)
    assert Row("flops", seconds=4.0, flops=int(2e9), bytes=int(1e9)).roofline(device) == pytest.approx(0.5)
    assert Row("bytes", seconds=4.0, flops=int(1e8), bytes=int(1e9)).roofline(device) == pytest.approx(0.25)
    assert Row("low", seconds=1.0, flops=int(2e9), low=True).roofline(device) == pytest.approx(0.5)
    assert Row("unknown", seconds=1.0).roofline(device) == 0.0


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.words = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_whole_and_fetches_nothing(profiled):
    report, path = profiled
    source = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(source)
    text = " ".join(reader.words)
    assert reader.open == [] and "<script" not in source and not re.search(r"(src|href)=|url\(|@import", source)
    assert "<two> products" in text and "forge plan  & its passes" in text
    assert f"{report.step_s * 1e3:.1f} ms a step" in text and "aten::mm" in text
    assert "waiting for the next batch" in text
    assert "value read by the host" in text and "graphs/test_profile.py" in text
    assert "item" in path.with_suffix(".txt").read_text(encoding="utf-8")
    trace = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert any(event.get("name") == "forge/forward" for event in trace["traceEvents"])


def test_stages_cost_nothing_outside_of_a_profile():
    assert type(stage("forward")).__name__ == "nullcontext"


def test_a_profile_without_work_can_be_written(tmp_path):
    report = ProfileReport(1, 0.0, {}, [], measured_cpu())
    assert "No step was watched" in write_report(report, tmp_path, "empty").read_text(encoding="utf-8")


def test_counters_see_graphs_breaks_and_recompiles():
    counters = CompileCounters()

    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled = torch.compile(broken, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    first = counters.counts()
    assert first.graphs == 2 and sum(first.breaks.values()) == 1
    counters.mark()
    compiled(torch.ones(3))
    later = counters.counts()
    assert later.recompiles >= 1 and "recompiles" in later.text()
    counters.mark()
    compiled(torch.ones(3))
    assert counters.counts().graphs == counters.counts().recompiles == 0


def test_command_profiles_a_tiny_run(tmp_path, capsys):
    flags = ["--model", "pi05", "--preset", "tiny", "--per-device-batch-size", "2", "--num-workers", "0"]
    assert main([*flags, "--steps", "2", "--warmup", "1", "--output-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 steps of" in said and "forward" in said and "ready for capture" in said
    (page,) = (tmp_path / "profiler").glob("*.html")
    assert page.name == "rank0_steps_2-3.html" and "hoist" in page.read_text(encoding="utf-8")


def test_command_checks_and_counts(capsys, tmp_path):
    flags = ["--model", "pi05", "--preset", "tiny", "--per-device-batch-size", "2", "--num-workers", "0"]
    assert main([*flags, "--check", "--output-dir", str(tmp_path)]) == 0
    assert "ready for capture" in capsys.readouterr().out
    assert main([*flags, "--cost", "--device-kind", "h100", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "roofline of H100" in said and "trim_tokens" in said and "activations" in said
    assert main(["--model", "pi5"]) == 2
