"""What a check finds: one defect each, with its file and episode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Finding:
    """A defect. `kind` is one of `KINDS`; a warning is worth knowing but nothing is read wrongly because of it."""

    kind: str
    message: str
    file: str = ""
    episode: int | None = None
    warning: bool = False

    def __str__(self) -> str:
        where = [f"episode {self.episode}"] if self.episode is not None else []
        where += [self.file] if self.file else []
        level = "warning" if self.warning else "error"
        return f"{level:7} {self.kind:11} {': '.join([*where, self.message])}"


KINDS = {
    "files": "metadata, parquet, video or HDF5 files that are missing, damaged or not used",
    "episodes": "the episode table: totals, ranges, episodes named twice",
    "rows": "rows that are not where the metadata says, or out of order",
    "types": "columns whose dtype or shape is not what info.json says",
    "timestamps": "times off the grid of frame / fps",
    "values": "NaN or infinity",
    "constant": "dimensions that never change",
    "tasks": "task numbers or texts that do not fit",
    "statistics": "stored statistics that disagree with the data",
    "video": "videos that are short, overlap, or do not decode",
    "duplicates": "episodes with the same content",
}


@dataclass
class Report:
    """The findings of one dataset, and what was looked at."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)

    def add(
        self, kind: str, message: str, file: object = "", episode: int | None = None, warning: bool = False
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"'{kind}' is no kind of finding")
        message = re.split(r"[:;] run `forge-data check`", message)[0].removesuffix(".")
        self.findings.append(Finding(kind, message, str(file), episode, warning))

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.warning]

    def lines(self, limit: int | None = 20) -> list[str]:
        """The report as text; of each kind at most `limit` findings (None: all) and how many more there are."""
        shown: Counter[str] = Counter()
        lines = [f"{self.name}: {', '.join(self.looked)}"]
        for finding in sorted(self.findings, key=lambda f: (f.warning, list(KINDS).index(f.kind))):
            shown[finding.kind] += 1
            if limit is None or shown[finding.kind] <= limit:
                lines.append(str(finding))
        for kind, count in shown.items():
            if limit is not None and count > limit:
                lines.append(f"... and {count - limit} more about {kind} (all of them with --all)")
        errors = len(self.errors)
        if self.findings:
            lines.append(f"{errors} errors, {len(self.findings) - errors} warnings")
        else:
            lines.append("no defect found")
        return lines


def brief(values: Sequence | np.ndarray, count: int = 6) -> str:
    """The first few of `values`, as text."""
    listed = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return ", ".join(map(str, listed[:count])) + (", ..." if len(listed) > count else "")
