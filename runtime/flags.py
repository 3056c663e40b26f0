"""Command-line flags made from a dataclass: one field, one flag.

A field is declared with a function that `group(title)` returns; its name `a_b` becomes ``--a-b`` (a bool
``--a-b`` and ``--no-a-b``), its annotation the type; default, choices and bounds are shown and checked.
Flags and dotlists (``model.x=1``) may be mixed in any order; names are never abbreviated.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from vlaforge.data.dtypes import OTHER
from vlaforge.data.errors import UserError, nearest, unknown
from vlaforge.data.ranges import fault, in_words
from vlaforge.runtime.values import describe, parse_text


def group(title: str) -> Callable[..., Any]:
    """The function that declares the fields shown under `title` in ``--help`` and in the docs."""

    def flag(
        default: Any,
        help: str,
        *,
        choices: Sequence[Any] = (),
        low: float | None = None,
        high: float | None = None,
        above: float | None = None,
        below: float | None = None,
        name: str = "",
        aliases: Sequence[str] = (),
        example: str = "",
    ) -> Any:
        """A dataclass field that is also a flag.

        Args:
            default: value when neither YAML nor the command line sets it; tuples are lists of values.
            help: one sentence without a full stop at the end.
            choices: the only values allowed; None is always allowed for an optional field.
            low, high, above, below: inclusive and exclusive bounds of a number.
            name: flag name without dashes where it is not the field's own (``with`` is no Python name).
            aliases: further flag names without dashes.
            example: what stands for the value in ``--help``.
        """
        bounds = {"low": low, "high": high, "above": above, "below": below}
        names = {"name": name, "aliases": tuple(aliases), "example": example}
        return field(
            default=default,
            metadata={"help": help, "group": title, "choices": tuple(choices)} | bounds | names,
        )

    return flag


@dataclass(frozen=True)
class Flag:
    """One flag as the parser, the help and the docs see it. `type` is the field's annotation."""

    field: str
    name: str
    aliases: tuple[str, ...]
    type: Any
    default: Any
    meta: Any

    @property
    def is_bool(self) -> bool:
        """A switch; with None as a third state it is unset until it is given."""
        return self.type in (bool, bool | None)

    @property
    def values(self) -> str:
        """What it takes, in words: its choices, or its type and bounds."""
        if self.meta["choices"]:
            return ", ".join(str(choice) for choice in self.meta["choices"])
        if self.is_bool:
            return "switch"
        return self.meta["example"] or " ".join(filter(None, [describe(self.type), self.bounds]))

    @property
    def bounds(self) -> str:
        return in_words(self.meta)

    @property
    def shown_default(self) -> str:
        if self.default is None or self.default == "":
            return "unset" if self.is_bool else "none"
        if self.is_bool:
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return " ".join(map(str, self.default)) or "none"
        return str(self.default)

    def check(self, value: Any) -> None:
        """Raises UserError when `value` is outside the choices or bounds."""
        if value is None:
            return
        for item in value if isinstance(value, tuple) else (value,):
            if self.meta["choices"] and item not in self.meta["choices"]:
                close = nearest(str(item), map(str, self.meta["choices"]), 1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise UserError(f"--{self.name} is '{item}'{hint}: allowed are {self.values}.")
            if wanted := fault(item, self.meta):
                raise UserError(f"--{self.name} is {item}: it must be {wanted}.")


@cache
def flags_of(cls: type) -> tuple[Flag, ...]:
    """All flags of a dataclass in order of declaration."""
    hints = get_type_hints(cls)
    return tuple(_flag(item, hints[item.name]) for item in fields(cls) if not item.metadata.get("internal"))


def _flag(item: Field, annotation: Any) -> Flag:
    name = item.metadata["name"] or item.name.replace("_", "-")
    default = item.default if item.default is not MISSING else None
    return Flag(item.name, name, item.metadata["aliases"], annotation, default, item.metadata)


def check_values(instance: Any) -> None:
    """Checks every field of a dataclass of flags; raises UserError with one sentence on the first fault. A dtype by the
    other of its two names is brought to the one among the choices."""
    for entry in flags_of(type(instance)):
        value = getattr(instance, entry.field)
        if isinstance(value, str) and value not in entry.meta["choices"] and OTHER.get(value) in entry.meta["choices"]:
            value = OTHER[value]
            object.__setattr__(instance, entry.field, value)
        entry.check(value)


# ---------------------------------------------------------------------------------------------------- parsing


@dataclass
class Given:
    """What was typed: flag values by field name, and dotlist entries (path, text) in order."""

    flags: dict[str, Any]
    spelled: dict[str, str]
    dotlist: list[tuple[str, str]]
    help: bool = False


_DOTLIST = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=")
_NUMBER = re.compile(r"-\.?\d")


def parse(cls: type, argv: Sequence[str]) -> Given:
    """Reads `argv`: flags of the dataclass `cls` and dotlists, in any order. Raises UserError."""
    table = {name: entry for entry in flags_of(cls) for name in (entry.name, *entry.aliases)}
    given = Given({}, {}, [])
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token in ("-h", "--help"):
            given.help = True
        elif token.startswith("--"):
            _take_flag(table, token, rest, given)
        elif _DOTLIST.match(token):
            path, _, text = token.partition("=")
            given.dotlist.append((path, text))
        else:
            close = nearest(token.lstrip("-"), table, 1)
            hint = f"did you mean '--{close[0]}'?" if close else "flags start with '--', settings read 'model.x=1'."
            raise UserError(f"'{token}' is neither a flag nor a setting: {hint}")
    return given


def _take_flag(table: dict[str, Flag], token: str, rest: list[str], given: Given) -> None:
    name, equals, text = token[2:].partition("=")
    name = name.replace("_", "-")
    entry = table.get(name)
    if entry is None and name.startswith("no-") and name[3:] in table and table[name[3:]].is_bool:
        entry, value = table[name[3:]], False
        if equals:
            raise UserError(f"--{name} takes no value; it was given '{text}'.")
    elif entry is None:
        raise unknown("flag", f"--{name}", [f"--{known}" for known in table])
    elif entry.is_bool:
        value = parse_text(text, entry.type, f"--{name}") if equals else True
    else:
        value = _value(entry, name, text if equals else None, rest)
    given.flags[entry.field] = value
    given.spelled[entry.field] = token if entry.is_bool else f"--{name}"


def _value(entry: Flag, name: str, text: str | None, rest: list[str]) -> Any:
    """The value after a flag; a list takes every following token that is no flag and no setting."""

    def is_value(token: str) -> bool:
        return not token.startswith("-") or bool(_NUMBER.match(token))

    if text is None:
        if not rest or not is_value(rest[0]):
            raise UserError(f"--{name} needs a value ({entry.values}).")
        text = rest.pop(0)
        if str(entry.type).startswith("tuple"):
            while rest and is_value(rest[0]) and not _DOTLIST.match(rest[0]):
                text += "," + rest.pop(0)
    return parse_text(text, entry.type, f"--{name}")


# ---------------------------------------------------------------------------------------------------- help


def help_text(cls: type, intro: str, outro: str = "", width: int = 110) -> str:
    """The text of ``--help``: flags by group with values and defaults."""
    groups: dict[str, list[Flag]] = {}
    for entry in flags_of(cls):
        groups.setdefault(entry.meta["group"], []).append(entry)
    parts = [intro.strip(), ""]
    for title, members in groups.items():
        parts.append(f"{title}:")
        for entry in members:
            parts += _help_lines(entry, width)
        parts.append("")
    return "\n".join([*parts, outro.strip()]).rstrip() + "\n"


def _help_lines(entry: Flag, width: int) -> list[str]:
    names = ", ".join(f"--{name}" for name in (entry.name, *entry.aliases))
    head = f"  {names}" if entry.is_bool else f"  {names} {_metavar(entry)}"
    if entry.is_bool and entry.default is not False:
        head = f"  --[no-]{entry.name}"
    facts = []
    if entry.meta["choices"]:
        facts.append(f"one of {entry.values}")
    elif entry.bounds:
        facts.append(entry.bounds)
    if entry.default is not False:
        facts.append(f"default: {entry.shown_default}")
    text = f"{entry.meta['help']} ({'; '.join(facts)})" if facts else entry.meta["help"]
    body = textwrap.wrap(text, width - 38)
    if len(head) > 36:
        return [head, *(" " * 38 + line for line in body)]
    return [head.ljust(38) + body[0], *(" " * 38 + line for line in body[1:])]


def _metavar(entry: Flag) -> str:
    if entry.meta["choices"]:
        return "NAME"
    return entry.meta["example"] or describe(entry.type).upper().split()[0]


def markdown(cls: type, head: str) -> str:
    """The flags by group as Markdown tables, under `head`."""
    lines = [head.strip()]
    title = None
    for entry in flags_of(cls):
        if entry.meta["group"] != title:
            title = entry.meta["group"]
            lines += ["", f"## {title}", "", "| flag | default | values | meaning |", "| --- | --- | --- | --- |"]
        names = ", ".join(f"`--{name}`" for name in (entry.name, *entry.aliases))
        if entry.is_bool:
            names += f", `--no-{entry.name}`"
        cells = (names, f"`{entry.shown_default}`", entry.values.replace("|", " \\| "), entry.meta["help"])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
