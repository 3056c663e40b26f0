"""Official checkpoints ↔ our parameter names: rules that read both ways, strict, and an account of every key.

A family's `convert.py` holds `LAYOUTS: dict[str, Layout]`. A `Rule` is a pair of key templates; ``{i}`` stands for a
layer number and ``{rest}`` for any ending, and both sides hold the same places. Loading fails, with all names listed,
when one of our keys is missing, when an official key fits no rule, or when a shape differs: nothing is filled in
silently.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file
from torch import Tensor, nn

from vlaforge.data.errors import UserError, unknown

State = dict[str, Tensor]
PLACES = {"i": r"\d+", "j": r"\d+", "rest": r".+"}
SHOWN = 12


@dataclass(frozen=True)
class Rule:
    """Official key template ↔ ours, with the change of the tensor each way (None: as it is).

    `reshape`: the official tensor holds the same values in another shape; loading views it in ours.
    """

    official: str
    ours: str
    load: Callable[[Tensor], Tensor] | None = None
    save: Callable[[Tensor], Tensor] | None = None
    reshape: bool = False

    def to_ours(self, official: Tensor, shape: Sequence[int]) -> Tensor:
        """The official tensor (a weight or its gradient) as ours, of `shape`; left as it is where sizes differ."""
        value = official if self.load is None else self.load(official)
        return value.reshape(tuple(shape)) if self.reshape and value.numel() == math.prod(shape) else value

    @cached_property
    def from_official(self) -> re.Pattern[str]:
        return _pattern(self.official)

    @cached_property
    def from_ours(self) -> re.Pattern[str]:
        return _pattern(self.ours)


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    text = "".join(f"(?P<{p}>{PLACES[p]})" if n % 2 else re.escape(p) for n, p in enumerate(parts))
    return re.compile(text)


@dataclass
class Account:
    """Where every key of a checkpoint went, and where every key of the model came from.

    Args:
        layout: name of the layout that was recognised.
        loaded: our keys, from their own official entry.
        tied: our key → the official key it was filled from, because its own entry is not stored.
        new: our keys that keep their fresh values, as was asked for by name.
        unused: official key → why nothing reads it.
    """

    layout: str
    loaded: list[str] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """A few lines for the log."""
        lines = [
            f"{self.layout}: {len(self.loaded)} loaded, {len(self.tied)} tied, {len(self.new)} new by name, "
            f"{len(self.unused)} unused"
        ]
        lines += [f"  tied    {key} from {source}" for key, source in self.tied.items()]
        lines += [f"  new     {key}" for key in self.new]
        lines += [f"  unused  {key}: {why}" for key, why in self.unused.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Layout:
    """One public layout of a family's weights.

    Args:
        name: for messages and for `--checkpoint-layout`-like choices.
        rules: every parameter, both ways; the first that fits counts.
        prefix: stands before every official key when saving. Loading takes keys with and without it.
        renames: (old, new) beginnings of official keys that earlier versions wrote; tried after the prefix is gone.
        ties: our key → official keys that hold the same tensor. They fill it when its own entry is absent, and are left
            unread when it is there.
        ties_written: what saving writes of a tied tensor, as the published files do: ``aliases`` or its ``own`` entry.
        skips: official key pattern (fnmatch, without prefix) → why it is not read.
        optional: our key patterns → why the model may lack them though the checkpoint has them.
        extra: our state → official entries (without prefix) that have no place in our model but belong to the file.
    """

    name: str
    rules: tuple[Rule, ...]
    prefix: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ties_written: Literal["aliases", "own"] = "aliases"
    skips: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    extra: Callable[[Mapping[str, Tensor]], State] | None = None

    def recognised(self, keys: Iterable[str]) -> int:
        """How many of `keys` have a place in this layout."""
        return sum(self._place(self._plain(key)) is not None for key in keys)

    def load(
        self, official: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], new: Sequence[str] = ()
    ) -> tuple[State, Account]:
        """Our state dict and the account.

        Args:
            official: the checkpoint.
            shapes: our keys with their shapes, all of them (`model.state_dict()` gives them).
            new: patterns of our keys that may keep their fresh values. One that fits nothing is an error.

        Raises:
            UserError: missing or unexpected keys, or wrong shapes; all are named.
        """
        account, state = Account(self.name), {}
        fresh = _chosen(new, shapes)
        aliases: dict[str, tuple[str, str]] = {}
        unexpected: list[str] = []
        for key in official:
            plain = self._plain(key)
            tied_to = next((ours for ours, names in self.ties.items() if plain in names), None)
            place = self._place(plain)
            if tied_to is not None:
                aliases[tied_to] = (key, f"the same tensor as {tied_to}, which has its own entry")
            elif (why := _fits(plain, self.skips)) is not None:
                account.unused[key] = why
            elif place is None:
                unexpected.append(key)
            elif place[0] in fresh:
                account.unused[key] = "its parameter is new, as asked for"
            elif place[0] in shapes:
                ours, rule = place
                state[ours] = rule.to_ours(official[key], shapes[ours])
                account.loaded.append(ours)
            elif (why := _fits(place[0], self.optional)) is not None:
                account.unused[key] = why
            else:
                unexpected.append(key)
        for ours, (key, why) in aliases.items():
            if ours in shapes and ours not in state and ours not in fresh:
                state[ours] = official[key]
                account.tied[ours] = key
            else:
                account.unused[key] = why
        account.new = [key for key in shapes if key in fresh]
        missing = [key for key in shapes if key not in state and key not in fresh]
        self._refuse(missing, unexpected, state, shapes)
        return state, account

    def save(self, state: Mapping[str, Tensor]) -> State:
        """The official state dict for ours. KeyError for a key that no rule covers."""
        out: State = {}
        for key, value in state.items():
            if key in self.ties and self.ties_written == "aliases":
                out.update(dict.fromkeys(self.ties[key], value))
                continue
            name, rule = self.official(key)
            out[name] = value if rule.save is None else rule.save(value)
        if self.extra is not None:
            out.update(self.extra(state))
        return {self.prefix + key: value for key, value in out.items()}

    def official(self, key: str) -> tuple[str, Rule]:
        """The official key (without prefix) and the rule for one of ours."""
        for rule in self.rules:
            if match := rule.from_ours.fullmatch(key):
                return rule.official.format(**match.groupdict()), rule
        raise KeyError(f"layout '{self.name}' has no rule for the parameter '{key}'")

    def ours(self, key: str) -> str | None:
        """Our key for an official one, or None when it has no place."""
        place = self.place(key)
        return None if place is None else place[0]

    def place(self, key: str) -> tuple[str, Rule] | None:
        """(our key, the rule) for an official one (with or without prefix), or None when it has no place."""
        return self._place(self._plain(key))

    def _plain(self, key: str) -> str:
        key = key.removeprefix(self.prefix)
        for old, current in self.renames:
            if key.startswith(old):
                return current + key[len(old) :]
        return key

    def _place(self, plain: str) -> tuple[str, Rule] | None:
        for rule in self.rules:
            if match := rule.from_official.fullmatch(plain):
                return rule.ours.format(**match.groupdict()), rule
        return None

    def _refuse(
        self, missing: list[str], unexpected: list[str], state: State, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        wrong = [
            f"{key} {tuple(value.shape)} instead of {tuple(shapes[key])}"
            for key, value in state.items()
            if tuple(value.shape) != tuple(shapes[key])
        ]
        faults = []
        if missing:
            named = [self.prefix + self.official(key)[0] for key in missing]
            faults.append(f"{len(missing)} missing ({_list(named)})")
        if unexpected:
            faults.append(f"{len(unexpected)} unexpected ({_list(unexpected)})")
        if wrong:
            faults.append(f"{len(wrong)} of another shape ({_list(wrong)})")
        if faults:
            raise UserError(
                f"The checkpoint does not fit the model (layout '{self.name}'): {'; '.join(faults)}. Give the "
                f"checkpoint of this model and size, or name the parameters that are meant to be new."
            )


def _fits(key: str, patterns: Mapping[str, str]) -> str | None:
    return next((why for pattern, why in patterns.items() if fnmatchcase(key, pattern)), None)


def _list(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _chosen(patterns: Sequence[str], keys: Iterable[str]) -> set[str]:
    chosen: set[str] = set()
    keys = list(keys)
    for pattern in patterns:
        found = {key for key in keys if fnmatchcase(key, pattern) or key.startswith(pattern + ".")}
        if not found:
            raise unknown("parameter", pattern, keys)
        chosen |= found
    return chosen


def detect(layouts: Mapping[str, Layout], keys: Iterable[str]) -> Layout:
    """The layout that knows most of `keys` (of equals, one whose prefix they carry). UserError when none knows any."""
    keys = list(keys)
    scored = [
        ((layout.recognised(keys), all(key.startswith(layout.prefix) for key in keys), len(layout.prefix)), layout)
        for layout in layouts.values()
    ]
    (known, *_), best = max(scored, key=lambda pair: pair[0])
    if not known:
        raise UserError(
            f"None of the checkpoint's {len(keys)} keys (such as '{keys[0] if keys else ''}') belongs to a layout that "
            f"this model reads: {', '.join(layouts)}."
        )
    return best


def read_safetensors(path: Path | str) -> State:
    """All tensors of a ``.safetensors`` file, or of a folder with ``model.safetensors`` or its shards and index."""
    path = Path(path).expanduser()
    if path.is_file():
        files = [path]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    elif (path / "model.safetensors.index.json").is_file():
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        files = [path / name for name in sorted(set(index.values()))]
    else:
        what = "is a folder without model.safetensors" if path.is_dir() else "does not exist"
        raise UserError(f"Checkpoint '{path}' {what}; give a .safetensors file, or a folder with model.safetensors.")
    state: State = {}
    for file in files:
        try:
            state.update(load_file(file))
        except Exception as error:
            raise UserError(f"'{file}' cannot be read as safetensors: {error}") from error
    return state


def load_official(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    official: Mapping[str, Tensor],
    layout: str | None = None,
    new: Sequence[str] = (),
) -> Account:
    """Loads a checkpoint in a public layout (found by its keys, or named) into `model`, and returns the account."""
    if layout is not None and layout not in layouts:
        raise unknown("checkpoint layout", layout, layouts)
    chosen = layouts[layout] if layout is not None else detect(layouts, official)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    state, account = chosen.load(official, shapes, new)
    model.load_state_dict(state, strict=False)
    return account
