"""Imports run one way, and optional packages are imported only where they are used. Read from the source."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("kernels", "graphs", "runtime", "models", "data", "eval", "bench")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "data": {"data"},
    "models": {"models", "data"},
    "graphs": {"graphs", "models", "data", "kernels"},
    "runtime": {"runtime", "graphs", "models", "data", "kernels"},
    "eval": {"eval", "runtime", "graphs", "models", "data", "kernels"},
    "bench": {"bench", "eval", "runtime", "graphs", "models", "data", "kernels"},
}
MODELS_SEE = ("vlaforge.data.schema", "vlaforge.data.errors", "vlaforge.data.ranges", "vlaforge.data.images")
PROCESSING_NEVER = ("vlaforge.data.readers", "vlaforge.data.loader")
MODULE_OF = {"pyyaml": "yaml", "pillow": "PIL"}
"""Distributions whose module has another name."""


def modules(*tops: str) -> list[Path]:
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; ``from a import b`` gives ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _at_import_time(tree) if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _at_import_time(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, but those under ``if`` and ``try``."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from node.body


def ours(name: str) -> bool:
    return name.split(".")[0] == "vlaforge"


@pytest.mark.parametrize("top", TOPS)
def test_imports_run_one_way(top):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(top)
        for name in imports(path)
        if ours(name) and name.split(".")[1] not in MAY_IMPORT[top]
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_import_torch_and_triton_only():
    allowed = {"torch", "triton", "vlaforge", *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules("kernels")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_models_see_only_the_schema_of_data():
    wrong = []
    for path in modules("models"):
        for name in imports(path):
            if not name.startswith("vlaforge.data"):
                continue
            if path.name == "processing.py":
                fits = not name.startswith(PROCESSING_NEVER)
            else:
                fits = name.startswith(MODELS_SEE)
            if not fits:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_where_they_are_used():
    """Importing the package must work with the core dependencies alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [re.match(r"[\w.-]+", entry).group().lower() for entry in project["dependencies"]]
    core = {MODULE_OF.get(name, name) for name in named} | {"vlaforge", *sys.stdlib_module_names}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(*TOPS)
        if "peers" not in path.parts
        for name in imports(path, top_level_only=True)
        if name.split(".")[0] not in core
    ]
    assert not wrong, "\n".join(wrong)
