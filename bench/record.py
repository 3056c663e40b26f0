"""The conditions of a measurement, and where its record goes: a number is never without them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlaforge.graphs import Plan

WIDTH = 120
PACKAGES = ("torch", "triton", "torchcodec", "av", "numpy", "pyarrow")


def conditions() -> dict[str, Any]:
    """Machine, versions and commit, JSON-able."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of this source tree, with ``+`` when it was changed; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def said(error: Exception) -> str:
    """An error as one line of a table."""
    return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:160]}"


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan for a record: its text whole, its sites counted by pass and kind (a run's own plan.json lists them)."""
    sites = {entry.name: dict(Counter(site.what for site in entry.sites)) for entry in plan.entries if entry.sites}
    whole = plan.json()
    return {"text": plan.text().splitlines(), "sites": sites, **{k: whole[k] for k in ("parameters", "options")}}


def dumped(value: Any, indent: int = 0) -> str:
    """JSON for people: what fits into a line is one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, dict | list) or len(line) + indent <= WIDTH:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, list):
        inside = (dumped(item, indent + 1) for item in value)
        return "[\n" + ",\n".join(pad + item for item in inside) + f"\n{pad[1:]}]"
    pairs = (f"{json.dumps(str(name), ensure_ascii=False)}: {dumped(item, indent + 1)}" for name, item in value.items())
    return "{\n" + ",\n".join(pad + pair for pair in pairs) + f"\n{pad[1:]}}}"


def record_path(folder: Path, name: str) -> Path:
    """``<name>-<time>.json`` in `folder`."""
    return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"


def write_record(folder: Path, name: str, body: dict[str, Any]) -> Path:
    """Writes ``<name>-<time>.json`` into `folder` and returns its path."""
    return rewrite_record(record_path(folder, name), body)


def rewrite_record(path: Path, body: dict[str, Any]) -> Path:
    """Writes the record at `path`, whole or not at all: one that grows keeps what it had when its process is ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(dumped(body) + "\n", encoding="utf-8")
    beside.replace(path)
    return path
