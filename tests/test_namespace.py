"""The folders at the root are subpackages of `vlaforge`, and nothing else: no module may exist twice."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("kernels", "graphs", "runtime", "models", "data", "eval", "bench")


@pytest.mark.parametrize("top", TOPS)
def test_each_folder_is_a_subpackage(top):
    package = importlib.import_module(f"vlaforge.{top}")
    folders = [Path(entry).resolve() for entry in package.__path__ if Path(entry).is_dir()]
    assert folders == [ROOT / top]


def test_the_repository_is_not_on_the_path():
    """With it there, `import kernels` would find ours instead of the package of that name."""
    assert ROOT not in {Path(entry or ".").resolve() for entry in sys.path}
    assert not (ROOT / "__init__.py").exists()


def test_no_module_is_loaded_twice():
    names: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and any(ROOT / top in Path(file).parents for top in TOPS):
            names.setdefault(file, []).append(name)
    assert {file: loaded for file, loaded in names.items() if len(loaded) > 1} == {}
    assert all(name.startswith("vlaforge.") for loaded in names.values() for name in loaded)


def test_commands_run_from_the_root_without_shadowing():
    """A console script started in the repository's root must not see the folders as top-level packages."""
    script = (
        "import importlib.util as u, sys, vlaforge.kernels, vlaforge.data; "
        "found = u.find_spec('kernels'); "
        f"sys.exit(found is not None and {str(ROOT)!r} in str(found.submodule_search_locations))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_package_folder_is_installed():
    """setup.py names each folder with Python files; a new one without it would be missing from a wheel."""
    from setuptools import find_namespace_packages

    for top in TOPS:
        found = {top, *(f"{top}.{sub}" for sub in find_namespace_packages(str(ROOT / top)))}
        for path in (ROOT / top).rglob("*.py"):
            assert ".".join(path.parent.relative_to(ROOT).parts) in found, path


def test_type_checkers_find_the_package():
    for top in TOPS:
        assert (ROOT / ".types" / "vlaforge" / top).resolve() == ROOT / top
        assert (ROOT / top / "py.typed").exists()
