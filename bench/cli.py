"""``forge-bench NAME``: measurements that say what they measured, and beside what.

A benchmark is a module of this folder with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code); its
first docstring line is its help. Adding the file adds the command.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

from vlaforge.data.errors import UserError, unknown

HERE = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Name → one line of help; read from the source, so that one benchmark's missing dependency hides no other."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"add_arguments", "run"} <= defined:
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    known = benchmarks()
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, known), default=0)
        lines = "\n".join(f"  {name.ljust(width)}  {text}" for name, text in known.items())
        print(f"usage: forge-bench NAME [options]\n\n{lines}\n\nforge-bench NAME --help lists the options of one.")
        return 0 if argv else 2
    try:
        if argv[0] not in known:
            raise unknown("benchmark", argv[0], known)
        module = importlib.import_module(f"vlaforge.bench.{argv[0]}")
        parser = argparse.ArgumentParser(prog=f"forge-bench {argv[0]}", description=known[argv[0]])
        module.add_arguments(parser)
        return module.run(parser.parse_args(argv[1:]))
    except UserError as error:
        print(f"forge-bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
