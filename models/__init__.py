"""Families are found, not listed: a folder here with `config.py` and `model.py`, or an entry point `vlaforge.models`.

`available()` gives the names, `family(name)` imports one. Nothing outside a family's folder is edited to add it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from vlaforge.data.errors import unknown

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Family:
    """The parts of one family, each imported when first asked for."""

    name: str
    package: str
    folder: Path

    def part(self, name: str) -> ModuleType:
        """The module `config`, `model`, `processing`, `convert` or `golden` of the family's folder."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def config(self) -> type:
        """The family's ModelConfig: a frozen dataclass with every hyperparameter."""
        return self.part("config").ModelConfig

    @property
    def data_config(self) -> type:
        """The family's DataConfig: extends `vlaforge.data.schema.DataConfig`."""
        return self.part("config").DataConfig

    @property
    def model(self) -> type:
        """The EmbodiedModel subclass; `model(config)` builds it, also on the meta device."""
        return self.part("model").Model

    @property
    def processing(self) -> type:
        return self.part("processing").Processing

    def presets(self) -> dict[str, Path]:
        """Preset name → YAML file. The full-size one is named after the family."""
        return {path.stem: path for path in sorted(self.folder.glob("*.yaml"))}


@cache
def _families() -> dict[str, Family]:
    found = {}
    for config in sorted(HERE.glob("*/config.py")):
        folder = config.parent
        if (folder / "model.py").exists():
            found[folder.name] = Family(folder.name, f"vlaforge.models.{folder.name}", folder)
    for entry in entry_points(group="vlaforge.models"):
        module = importlib.import_module(entry.value)
        found[entry.name] = Family(entry.name, entry.value, Path(next(iter(module.__path__))))
    return found


def available() -> list[str]:
    """Names of all families on this machine, sorted."""
    return sorted(_families())


def family(name: str) -> Family:
    """The family called `name` ('-' and '_' are the same, case does not count). UserError names the nearest."""
    wanted = name.lower().replace("-", "_")
    known = _families()
    if wanted not in known:
        raise unknown("model", name, known)
    return known[wanted]
