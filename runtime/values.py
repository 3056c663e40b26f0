"""Values from text and YAML to the types that dataclasses declare, or one sentence why they don't fit."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from vlaforge.data.errors import UserError
from vlaforge.data.ranges import check_numbers

_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def describe(annotation: Any) -> str:
    """The type in words, for messages: ``integer``, ``list of number``, ``text or none``."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if annotation is type(None):
        return "none"
    if is_union(annotation):
        return " or ".join(describe(option) for option in inner)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (tuple, list, Sequence):
        many = origin is not tuple or (len(inner) == 2 and inner[1] is Ellipsis)
        return f"list of {describe(inner[0])}" if many else f"list of {len(inner)} values"
    if origin in (dict, Mapping):
        return f"mapping to {describe(inner[1])}"
    return "settings" if is_dataclass(annotation) else getattr(annotation, "__name__", str(annotation))


def parse_text(text: str, annotation: Any, where: str) -> Any:
    """`text` of a command line as `annotation`; lists are ``1,2`` or ``[1, 2]``. Raises UserError."""
    options = get_args(annotation) if is_union(annotation) else (annotation,)
    if type(None) in options and text.lower() in ("none", "null", "~"):
        return None
    if str in options or Path in options:
        return coerce(text, annotation, where)
    is_list = any(get_origin(option) in (tuple, list) for option in options)
    if is_list and not text.strip().startswith("["):
        text = f"[{text}]"
    return coerce(yaml_value(text, where), annotation, where)


def yaml_value(text: str, where: str) -> Any:
    """`text` read as one YAML value: a number, a word, a list or a mapping."""
    from omegaconf import OmegaConf  # here, since benchmarks on a bare GPU machine read no command line of a run
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{where} is '{text}', which cannot be read: {why}.") from error


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """`value` as `annotation`; whole floats become ints, lists tuples. Raises UserError naming `where`."""
    if annotation is Any or (isinstance(annotation, type) and type(value) is annotation):
        return value
    if is_union(annotation):
        return _coerce_union(value, annotation, where)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if value in inner:
            return value
    elif is_dataclass(annotation):
        if isinstance(value, Mapping):
            return build(annotation, value, where)
    elif origin in (tuple, list, Sequence):
        if isinstance(value, Sequence) and not isinstance(value, str):
            return _coerce_list(value, annotation, where)
    elif origin in (dict, Mapping) or annotation is dict:
        if isinstance(value, Mapping):
            kinds = inner or (Any, Any)
            return {
                coerce(key, kinds[0], where): coerce(item, kinds[1], f"{where}.{key}") for key, item in value.items()
            }
    else:
        done, result = _coerce_scalar(value, annotation)
        if done:
            return result
    raise UserError(f"{where} is {value!r}: it must be {_article(describe(annotation))}.")


def _coerce_scalar(value: Any, annotation: Any) -> tuple[bool, Any]:
    if isinstance(value, bool) or value is None:
        return False, None
    if annotation is int and isinstance(value, float) and value.is_integer():
        return True, int(value)
    if annotation is float and isinstance(value, int):
        return True, float(value)
    if annotation is str and isinstance(value, (int, float)):
        return True, str(value)
    if annotation is Path and isinstance(value, str):
        return True, Path(value)
    return False, None


def _coerce_union(value: Any, annotation: Any, where: str) -> Any:
    options = get_args(annotation)
    if value is None and type(None) in options:
        return None
    for option in options:
        if option is type(value):
            return value
        if is_dataclass(option) and isinstance(value, Mapping):
            return build(option, value, where)  # what is wrong inside is said
    for option in options:
        if option is type(None):
            continue
        try:
            return coerce(value, option, where)
        except UserError:
            continue
    raise UserError(f"{where} is {value!r}: it must be {_article(describe(annotation))}.")


def _coerce_list(value: Sequence[Any], annotation: Any, where: str) -> Any:
    origin, inner = get_origin(annotation), get_args(annotation)
    fixed = origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis)
    if fixed and len(value) != len(inner):
        raise UserError(f"{where} has {len(value)} values: it must have {len(inner)}.")
    kinds = inner if fixed else [inner[0]] * len(value)
    items = [coerce(item, kind, f"{where}[{i}]") for i, (item, kind) in enumerate(zip(value, kinds))]
    return items if origin is list else tuple(items)


def _article(words: str) -> str:
    if words.startswith(("one of", "true", "text", "none", "settings")):
        return words
    return ("an " if words[0] in "aeiou" else "a ") + words


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """The dataclass `cls` from a mapping of known names; a ValueError of its own becomes a UserError."""
    hints = get_type_hints(cls)
    for item in fields(cls):
        if item.name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{where}.{item.name} has no default: give it.")
    arguments = {name: coerce(value, hints[name], f"{where}.{name}") for name, value in values.items()}
    check_numbers(cls, hints, arguments, where)
    try:
        return cls(**arguments)
    except ArithmeticError as error:
        raise UserError(f"The numbers of {where} do not go together: computing with them fails ({error}).") from error
    except (ValueError, AssertionError) as error:
        text = str(error).rstrip(".")
        joint = "." if text.split(" ")[0] in hints else ": "
        raise UserError(f"{where}{joint}{text}.") from error


def plain(value: Any) -> Any:
    """A dataclass, tuple or path as what YAML and JSON hold: dicts, lists, text, numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = [item.name for item in fields(value) if not item.metadata.get("internal")]
        return {name: plain(getattr(value, name)) for name in shown}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def defaults(cls: type) -> dict[str, Any]:
    """The declared defaults of `cls` as plain values; fields without one are left out."""
    found = {}
    for item in fields(cls):
        if item.metadata.get("internal"):
            continue
        if item.default is not MISSING:
            found[item.name] = plain(item.default)
        elif item.default_factory is not MISSING:
            found[item.name] = plain(item.default_factory())
    return found
