"""forge-bench: found by file, faults in one sentence, and a record that says its conditions."""

from __future__ import annotations

import json

from vlaforge.bench.cli import benchmarks, main


def test_benchmarks_are_found_by_their_files(capsys):
    assert "data" in benchmarks() and "cli" not in benchmarks()
    assert main(["--help"]) == 0
    assert "LeRobot" in capsys.readouterr().out
    assert main(["dat"]) == 2
    assert "did you mean 'data'" in capsys.readouterr().err


def test_a_peer_that_is_absent_is_said(monkeypatch, capsys):
    monkeypatch.delenv("VLAFORGE_PEER_PYTHON", raising=False)
    assert main(["data"]) == 2
    assert "--peer-python" in capsys.readouterr().err
    assert main(["data", "--peer-python", "/no/such/python"]) == 2
    assert "/no/such/python" in capsys.readouterr().err


def test_own_side_runs_and_leaves_a_record(tmp_path, capsys):
    words = "data --no-peer --workers 1 --repeats 1 --seconds 0.3 --warmup 1 --batch-size 8 --output"
    assert main([*words.split(), str(tmp_path)]) == 0
    assert "samples/s" in capsys.readouterr().out
    (record,) = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert record["runs"][0]["samples_per_s"] > 0 and record["runs"][0]["cpu_ms_per_sample"] > 0
    assert record["cpu"] and record["versions"]["torch"] and record["settings"]["batch_size"] == 8


def test_a_side_that_fails_shows_its_error(tmp_path, capsys):
    assert main(["data", "--no-peer", "--dataset-path", str(tmp_path), "--repeats", "1", "--workers", "1"]) == 2
    assert "without a result" in capsys.readouterr().err
