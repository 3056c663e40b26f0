"""`forge-parity`: is this model, number by number, the official one?

    forge-parity --model pi05 --golden DIR                  the model as declared
    forge-parity --model pi05 --golden DIR --compile        the model as it would train
    forge-parity --model pi05 --golden DIR --lower --without fuse

Exit codes: 0 all within tolerance, 1 not, 2 something given cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vlaforge.data.errors import UserError
from vlaforge.models.golden import subject
from vlaforge.runtime.parity import Lower, compare, lower_with, table
from vlaforge.runtime.streams import tolerant


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge-parity",
        allow_abbrev=False,
        description="Compares a model with the recorded results of its official implementation.",
    )
    parser.add_argument(
        "--model", "--model-name", required=True, metavar="NAME", help="a family, or an encoder: umt5, wan_vae22"
    )
    parser.add_argument("--golden", required=True, metavar="DIR", help="folder with the recorded results")
    parser.add_argument("--verbose", action="store_true", help="one line for each gradient norm")
    lowering = parser.add_argument_group("lowering", "any of these compares the model as it would train")
    lowering.add_argument("--lower", action="store_true", help="apply the default plan")
    lowering.add_argument("--compile", action="store_true", help="compile the repeated blocks too")
    lowering.add_argument("--with", dest="with_", default="", metavar="PASS,...", help="passes to turn on")
    lowering.add_argument("--without", default="", metavar="PASS,...", help="passes to turn off")
    lowering.add_argument("--fuel", type=int, metavar="N", help="apply only the plan's first N changes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code."""
    tolerant()
    args = parser().parse_args(argv)
    try:
        report = compare(subject(args.model), args.golden, _lower(args))
    except UserError as error:
        print(f"forge-parity: {error}", file=sys.stderr)
        return 2
    print(report.account.text())
    if report.plan:
        print(report.plan)
    print(table(report, args.verbose))
    print(report.last_line())
    return 0 if report.passed else 1


def _lower(args: argparse.Namespace) -> Lower | None:
    names = {key: tuple(filter(None, getattr(args, key).split(","))) for key in ("with_", "without")}
    if not (args.lower or args.compile or args.fuel is not None or any(names.values())):
        return None
    return lower_with(compile="on" if args.compile else "off", fuel=args.fuel, **names)
