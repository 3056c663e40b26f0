"""`forge-data`: look into a dataset, check it, take its statistics, convert it. It never changes a dataset.

    forge-data inspect PATH --output page.html      what is in it, as a page with pictures
    forge-data check PATH                           every defect with its file and episode; exit code 1 if there are any
    forge-data stats PATH --output stats.json       mean, std, min, max and true quantiles
    forge-data convert PATH NEW --to v3.0           LeRobot v2.0 → v2.1 → v3.0, HDF5 → v3.0, into a new folder
    forge-data precompute --model NAME ...          frozen encoders' work as a cache (precompute --help)

Exit codes: 0 done, 1 defects found, 2 something given cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from vlaforge.data.check import check
from vlaforge.data.convert import CAMERAS, TARGETS, Conversion, convert
from vlaforge.data.convert.writer import Limits
from vlaforge.data.dataset import Dataset
from vlaforge.data.errors import UserError, unknown
from vlaforge.data.inspect import summary, write_page
from vlaforge.data.readers import FORMATS, guess_format, local_path, open_dataset
from vlaforge.data.readers.hdf5 import LAYOUTS
from vlaforge.data.readers.hdf5.recordings import Options
from vlaforge.data.readers.lerobot import VERSIONS
from vlaforge.data.schema import ACTION, STATE
from vlaforge.data.statistics import StatisticsSpec, cached, to_json
from vlaforge.data.video import BACKENDS
from vlaforge.runtime.streams import tolerant


class _Parser(argparse.ArgumentParser):
    """One clear sentence instead of usage and a message."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]} ({self.prog} --help lists the options).")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's) and returns the exit code."""
    tolerant()
    parser, words = _parser(), list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["precompute"]:  # it takes forge-run's flags, so its words are parsed there
            from vlaforge.runtime.precompute import main as precompute

            return precompute(words[1:])
        args, rest = parser.parse_known_args(words)
        if rest:
            raise unknown("argument", rest[0], args.options)
        return args.run(args)
    except UserError as error:
        print(f"forge-data: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # read-only, full or vanished: the machine's, not the program's fault
        where = f"'{error.filename}': " if error.filename else ""
        print(f"forge-data: {where}{error.strerror or error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="forge-data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="commands", required=True, parser_class=_Parser, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("path", help="folder, HDF5 file or hub id of the dataset")
        _add_source(one)
        one.set_defaults(run=run)
        return one

    inspect = command("inspect", _inspect, "What is in a dataset, as a page with pictures")
    inspect.add_argument("--output", type=Path, help="the page (default: NAME.html in this folder)")
    _add_selection(inspect)
    checking = command("check", _check, "Every defect of a dataset; exit code 1 if there are any")
    checking.add_argument("--frames", default="ends", choices=("ends", "all", "none"), help="frames to decode")
    checking.add_argument("--all", action="store_true", help="list all findings, not the first 20 of a kind")
    checking.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    stats = command("stats", _stats, "Statistics of actions and states")
    stats.add_argument("--output", type=Path, help="write them to this JSON file")
    _add_selection(stats)
    converting = command("convert", _convert, "Write a dataset in another format to a new folder")
    _add_conversion(converting)
    for one in commands.choices.values():
        one.set_defaults(options=[option for action in one._actions for option in action.option_strings])
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("source")
    group.add_argument("--dataset-format", choices=FORMATS, help="default: found out")
    group.add_argument("--lerobotdataset-version", choices=tuple(VERSIONS), help="that it must have")
    group.add_argument("--hdf5-layout", choices=tuple(LAYOUTS), help="default: found out")
    group.add_argument("--video-backend", choices=BACKENDS, help="default: torchcodec where it works, else pyav")
    group.add_argument("--action-key", default=ACTION, help="column of the action; several with commas")
    group.add_argument("--state-key", default=STATE, help="column of the state; several with commas")
    group.add_argument("--language-key", help="column with the task")
    group.add_argument("--fps", type=float, help="rows a second of HDF5 recordings")


def _add_selection(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("selection")
    group.add_argument("--episodes", help="numbers and ranges, such as 0:10,15 (default: all)")
    group.add_argument("--split", default="all", help="a split of info.json (default: all)")


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    how, limits = Conversion(), Limits()
    parser.add_argument("output", type=Path, metavar="NEW", help="new folder; it appears when all of it is written")
    parser.add_argument("--to", default=how.target, choices=TARGETS, help=f"default {how.target}")
    parser.add_argument("--cameras", default=how.cameras, choices=CAMERAS, help="HDF5: encode, or keep the pictures")
    parser.add_argument("--video-codec", default=how.codec, help=f"HDF5: encoder (default {how.codec})")
    parser.add_argument("--crf", type=int, default=how.crf, help=f"HDF5: quality, lower is better (default {how.crf})")
    parser.add_argument("--data-files-size-in-mb", type=float, default=limits.data_mb)
    parser.add_argument("--video-files-size-in-mb", type=float, default=limits.video_mb)


def _source(args: argparse.Namespace) -> tuple[Path, str]:
    path = local_path(args.path)
    return path, args.dataset_format or guess_format(path)


def _open(args: argparse.Namespace) -> Dataset:
    path, kind = _source(args)
    return open_dataset(
        path,
        format=kind,
        version=args.lerobotdataset_version,
        episodes=args.episodes,
        split=args.split,
        video_backend=args.video_backend,
        action_key=args.action_key,
        state_key=args.state_key,
        language_key=args.language_key,
        hdf5_layout=args.hdf5_layout,
        fps=args.fps,
    )


def _hdf5_options(args: argparse.Namespace) -> Options:
    return Options(
        action_key=None if args.action_key == ACTION else args.action_key,
        state_key=None if args.state_key == STATE else args.state_key,
        language_key=args.language_key,
        fps=args.fps,
    )


def _inspect(args: argparse.Namespace) -> int:
    dataset = _open(args)
    goal = args.output or Path(f"{dataset.info.path.name}.html")
    write_page(dataset, goal)
    for name, value in summary(dataset):
        print(f"{name:9} {value}")
    print(f"page      {goal}")
    return 0


def _check(args: argparse.Namespace) -> int:
    path, kind = _source(args)
    report = check(
        path,
        format=kind,
        version=args.lerobotdataset_version,
        hdf5_layout=args.hdf5_layout,
        options=_hdf5_options(args),
        video_backend=args.video_backend,
        frames=args.frames,
    )
    print("\n".join(report.lines(None if args.all else 20)))
    return 1 if report.errors or (args.strict and report.findings) else 0


def _stats(args: argparse.Namespace) -> int:
    dataset = _open(args)
    if args.output is not None and dataset.info.path.resolve() in args.output.resolve().parents:
        raise UserError(f"'{args.output}' would lie inside the dataset: give --output a file elsewhere.")
    found = cached(dataset, StatisticsSpec())
    print(found.origin)
    for key, entry in found.values.items():
        print(f"\n{key}" + "".join(f"{name:>11}" for name in entry if name != "count"))
        for at in range(len(entry["mean"])):
            print(f"{at:>{len(key)}}" + "".join(f"{entry[name][at]:11.4g}" for name in entry if name != "count"))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(to_json(found.values), encoding="utf-8")
        print(f"\nwritten to {args.output}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    path, kind = _source(args)
    how = Conversion(
        target=args.to,
        format=kind,
        hdf5_layout=args.hdf5_layout,
        options=_hdf5_options(args),
        video_backend=args.video_backend,
        limits=Limits(args.data_files_size_in_mb, args.video_files_size_in_mb),
        cameras=args.cameras,
        codec=args.video_codec,
        crf=args.crf,
    )
    convert(path, args.output, how)
    print(f"written to {args.output}")
    return 0
