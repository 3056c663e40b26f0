"""From files and the command line to one resolved configuration, with the origin of every value.

    dataclass defaults  <  preset YAML  <  recipe YAML  <  --config-file  <  flags and dotlists

A layer is a tree with the sections ``model``, ``data`` and ``train`` (the flags, by field name). Layers are
laid over one another leaf by leaf, names and types are checked as they come in, and ``${...}`` is resolved
once at the end over the merged tree, so that a flag reaches what refers to it. A mapping field (cameras) is
replaced as a whole by a file; a dotlist sets one entry of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vlaforge.data.errors import UserError, unknown
from vlaforge.models import Family, available, family
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.flags import Given, parse
from vlaforge.runtime.unused import unused
from vlaforge.runtime.values import build, coerce, defaults, is_union, parse_text, plain

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "samples"
"""The bundled datasets; ``${samples}`` in a configuration file."""
NOT_SAVED = ("config_file", "print_config", "dry_run", "plan", "resume", "export")
"""What one call asked for, and a saved configuration must not ask for again."""


@dataclass(frozen=True)
class Resolved:
    """Everything that a run is made from.

    `provenance` says for every dotted name (``train.lr_base``, ``model.action_dim``) where its value came
    from: ``default``, a file's name, a flag or a dotlist. `notes` are sentences for the log.
    """

    args: TrainingArgs
    family: Family
    model_config: Any
    data_config: Any
    provenance: Mapping[str, str] = field(compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def tree(self) -> dict[str, Any]:
        """The sections as plain values: what a configuration file holds."""
        train = {name: value for name, value in plain(self.args).items() if name not in NOT_SAVED}
        return {"train": train, "model": plain(self.model_config), "data": plain(self.data_config)}

    def to_yaml(self, origins: bool = True) -> str:
        """YAML that ``--config-file`` reads back to an equal configuration; origins stand in comments."""
        return "\n".join(_yaml_lines(self.tree(), self.provenance if origins else {})) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_yaml(), encoding="utf-8")

    def digest(self) -> str:
        """A short hash of the model, data and training settings, the output folder aside."""
        tree = self.tree()
        tree["train"].pop("output_dir")
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def resolve(argv: Sequence[str]) -> Resolved:
    """The configuration that a command line asks for. Raises UserError on the first fault."""
    return resolve_given(parse(TrainingArgs, argv))


def resolve_given(given: Given) -> Resolved:
    """As `resolve`, from a parsed command line."""
    named = given.flags.get("config_file")
    file = load_yaml(Path(named), "--config-file") if named else {}

    def choice(name: str) -> Any:
        section = file.get("train")
        return given.flags.get(name, section.get(name) if isinstance(section, Mapping) else None)

    if not choice("model"):
        raise UserError(f"No model was named: give --model with one of {', '.join(available())}.")
    chosen = family(str(choice("model")))
    layers = Layers(chosen)
    presets = chosen.presets()
    preset = choice("preset") or (chosen.name if chosen.name in presets else None)
    if preset is not None:
        layers.add_file(load_yaml(_pick("preset", preset, presets, chosen), "preset"), f"{preset}.yaml")
    recipe = choice("recipe")
    if recipe is not None:
        layers.add_file(load_yaml(_pick("recipe", recipe, recipes(chosen), chosen), "recipe"), f"recipe {recipe}")
    layers.add_file(file, Path(named).name if named else "", saved=True)
    layers.add_given(given)
    layers.put("train", "model", chosen.name, layers.origin["train.model"])
    return layers.finish(_recipe_notes(layers, recipe) if recipe is not None else ())


def recipes(chosen: Family) -> dict[str, Path]:
    """Recipe name → YAML file of a family."""
    return {path.stem: path for path in sorted((chosen.folder / "recipes").glob("*.yaml"))}


def _pick(kind: str, name: Any, known: Mapping[str, Path], chosen: Family) -> Path:
    if name not in known:
        raise unknown(f"{kind} of {chosen.name}", str(name), known)
    return known[name]


def _recipe_notes(layers: Layers, recipe: str) -> tuple[str, ...]:
    """What the recipe decides, and which of its settings something else overrode."""
    source = f"recipe {recipe}"
    kept = [f"{name}={layers.get(name)}" for name in layers.touched[source] if layers.origin[name] == source]
    lost = [name for name in layers.touched[source] if layers.origin[name] != source]
    notes = [f"Recipe {recipe} reproduces the published behaviour with {', '.join(kept) or 'no setting'}."]
    if lost:
        notes.append(f"Recipe {recipe}: you set {', '.join(lost)} yourself.")
    return tuple(notes)


def load_yaml(path: Path, what: str) -> dict[str, Any]:
    """A file as nested dicts; of ``${...}`` only ``${here}``, its folder, and ``${samples}`` are resolved."""
    try:
        text = path.read_text(encoding="utf-8")
        text = text.replace("${here}", str(path.resolve().parent)).replace("${samples}", str(SAMPLES))
        tree = OmegaConf.to_container(OmegaConf.create(text or "{}"), resolve=False)
    except OSError as error:
        raise UserError(f"The file '{path}' of {what} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None)
        place = f" at line {mark.line + 1}{f': {problem}' if problem else ''}" if mark else ""
        raise UserError(f"The file '{path}' of {what} is not valid YAML{place}.") from error
    if not isinstance(tree, dict):
        raise UserError(f"The file '{path}' of {what} must hold the sections model, data and train.")
    return {str(key): value for key, value in tree.items()}


# ---------------------------------------------------------------------------------------------------- layers


class Layers:
    """The tree under construction: values, and for each leaf the layer that set it last."""

    def __init__(self, chosen: Family):
        self.family = chosen
        self.classes = {"train": TrainingArgs, "model": chosen.config, "data": chosen.data_config}
        self.values = {section: defaults(cls) for section, cls in self.classes.items()}
        self.origin = {name: "default" for section, tree in self.values.items() for name in _leaf_names(tree, section)}
        self.touched: dict[str, list[str]] = {}

    def add_file(self, tree: Mapping[str, Any], source: str, saved: bool = False) -> None:
        """Lays a file's sections over what is there. Raises UserError for a wrong name or type.

        `saved`: the file may be a configuration that a run saved, with all its defaults; those stay defaults.
        """
        self.touched[source] = []
        for section, values in tree.items():
            if section not in self.classes:
                raise unknown(f"section in {source}", section, self.classes)
            if not isinstance(values or {}, Mapping):
                raise UserError(f"Section '{section}' of {source} must hold settings, one a line.")
            self._overlay(self.classes[section], self.values[section], values or {}, section, source, saved)

    def add_given(self, given: Given) -> None:
        """Lays flags and dotlists over everything."""
        for name, value in given.flags.items():
            self.put("train", name, value, given.spelled[name])
        for path, text in given.dotlist:
            self._set_dotted(path, text)

    def put(self, section: str, name: str, value: Any, source: str) -> None:
        self.values[section][name] = plain(value)
        self._mark(f"{section}.{name}", source)

    def get(self, dotted: str) -> Any:
        here: Any = self.values
        for part in dotted.split("."):
            here = here[part]
        return here

    def _mark(self, name: str, source: str) -> None:
        self.origin[name] = source
        self.touched.setdefault(source, []).append(name)

    def _overlay(self, cls: type, target: dict[str, Any], values: Mapping, path: str, source: str, saved: bool) -> None:
        hints = get_type_hints(cls)
        for name, value in values.items():
            dotted = f"{path}.{name}"
            if name not in hints:
                raise unknown(f"setting in {source}", dotted, self._known())
            nested = _dataclass_in(hints[name])
            if nested and isinstance(value, Mapping):
                if not isinstance(target.get(name), dict):
                    target[name] = defaults(nested)
                self._overlay(nested, target[name], value, dotted, source, saved)
                continue
            if "${" not in str(value):
                value = plain(coerce(value, hints[name], f"{dotted} in {source}"))
            repeats = name in target and target[name] == value and self.origin.get(dotted) == "default"
            target[name] = value
            if not (saved and repeats):
                self._mark(dotted, source)

    def _set_dotted(self, path: str, text: str) -> None:
        section, *parts = path.split(".")
        if section == "train":
            spelled = "-".join(parts).replace("_", "-")
            raise UserError(f"'{path}={text}': training settings are flags, write --{spelled}.")
        if section not in self.classes or not parts:
            raise UserError(f"'{path}={text}': a setting starts with 'model.' or 'data.'.")
        hint, here = self.classes[section], self.values[section]
        for depth, part in enumerate(parts):
            nested = _dataclass_in(hint)
            if nested:
                hints = get_type_hints(nested)
                if part not in hints:
                    raise unknown("setting", path, self._known())
                hint = hints[part]
            elif get_origin(hint) is dict:
                hint = get_args(hint)[1]
            else:
                raise unknown("setting", path, self._known())
            if depth < len(parts) - 1:
                if not isinstance(here.get(part), dict):
                    here[part] = defaults(_dataclass_in(hint)) if _dataclass_in(hint) else {}
                here = here[part]
        if _dataclass_in(hint):
            first = fields(_dataclass_in(hint))[0].name
            raise UserError(f"'{path}' holds several settings: set one of them, like {path}.{first}.")
        here[parts[-1]] = text if "${" in text else plain(parse_text(text, hint, path))
        self._mark(path, "command line")

    def _known(self) -> list[str]:
        return [name for section, cls in self.classes.items() for name in _field_names(cls, section)]

    def finish(self, notes: tuple[str, ...]) -> Resolved:
        """Resolves interpolation and builds the dataclasses."""
        try:
            tree = OmegaConf.to_container(OmegaConf.create(self.values), resolve=True)
        except OmegaConfBaseException as error:
            name, why = getattr(error, "full_key", None) or "A setting", str(error).splitlines()[0]
            raise UserError(f"{name} refers to something that is not there: {why}.") from error
        parts = {section: build(cls, tree[section], section) for section, cls in self.classes.items()}
        kind = getattr(parts["model"], "model_type", self.family.name)
        if kind != self.family.name:
            raise UserError(f"model.model_type is '{kind}', but --model is {self.family.name}: leave it out.")
        given = {name for name, source in self.origin.items() if source != "default" and name.startswith("train.")}
        names = frozenset(name.removeprefix("train.") for name in given)
        parts["train"] = replace(parts["train"], given=names)
        spelled = {name.removeprefix("train."): flag for name, flag in self.origin.items() if flag.startswith("--")}
        said = (*notes, *_warnings(parts["train"]), *unused(parts["train"], spelled))
        return Resolved(parts["train"], self.family, parts["model"], parts["data"], dict(self.origin), said)


def _warnings(args: TrainingArgs) -> Iterator[str]:
    """Settings that work, but hardly do what was meant."""
    length = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters >= length:
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} is not less than the {length} steps of the schedule: "
            "the learning rate never reaches --lr-base."
        )
    if args.min_lr >= args.lr_base and "min_lr" in args.lr_decay_style:
        yield f"--min-lr {args.min_lr:g} is not below --lr-base {args.lr_base:g}: the rate does not decay."


# ---------------------------------------------------------------------------------------------------- helpers


def _dataclass_in(annotation: Any) -> type | None:
    """The dataclass that `annotation` is, or that it may be besides None."""
    for option in get_args(annotation) if is_union(annotation) else (annotation,):
        if isinstance(option, type) and is_dataclass(option):
            return option
    return None


def _field_names(cls: type, path: str) -> Iterator[str]:
    for name, hint in get_type_hints(cls).items():
        nested = _dataclass_in(hint)
        if nested:
            yield from _field_names(nested, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def _leaf_names(tree: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaf_names(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def _yaml_lines(tree: Mapping[str, Any], origins: Mapping[str, str], path: str = "", depth: int = 0) -> Iterator[str]:
    for name, value in tree.items():
        dotted = f"{path}.{name}" if path else name
        lead = "  " * depth + f"{_scalar(name)}:"
        if isinstance(value, Mapping) and value:
            note = f"  # {origins[dotted]}" if dotted in origins and origins[dotted] != "default" else ""
            yield lead + note
            yield from _yaml_lines(value, origins, dotted, depth + 1)
        else:
            line = f"{lead} {_scalar(value)}"
            yield f"{line:<48}  # {origins.get(dotted, 'default')}" if origins else line


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


def setting_lines(resolved: Resolved) -> list[str]:
    """``model.x = value`` for each setting of the model and the data, in order of declaration."""
    tree = {section: values for section, values in resolved.tree().items() if section != "train"}
    lines = []
    for section, values in tree.items():
        for name in _leaf_names(values, section):
            here: Any = tree
            for part in name.split("."):
                here = here[part]
            lines.append(f"{name} = {_scalar(here)}")
    return lines
