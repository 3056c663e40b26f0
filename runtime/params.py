"""Parameters by the names that people write: dotted paths, tower names, patterns. One rule for every flag.

A *selector* is, in this order of meaning:
  a path       ``language.layers.0`` or ``action_in_proj.weight``: that module's parameters, or that parameter
  a tower      a name of `model.towers()`: ``vision``, ``expert``, ...
  a pattern    fnmatch over module and parameter paths: ``*.q_proj``, ``language.layers.[0-3].*``
A selector that selects nothing is an error that names the nearest right ones: a recipe never trains
something else than it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from vlaforge.data.errors import UserError, nearest
from vlaforge.graphs.packing import packed_parts
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.optim.base import Group

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical(name: str) -> str:
    """A parameter's name without the segments that compile, recompute, DDP and FSDP put in."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def parameter_names(model: nn.Module, selector: str, flag: str) -> list[str]:
    """Canonical names of the parameters that `selector` means, in the model's order.

    Raises:
        UserError: it means none; the message names `flag` and the nearest paths.
    """
    names = [name for name, _ in model.named_parameters()]
    prefixes = _prefixes(model, selector)
    if any(char in selector for char in "*?["):
        modules = [path for path, _ in model.named_modules() if path and fnmatchcase(path, selector)]
        prefixes = [*prefixes, *modules, *(name for name in names if fnmatchcase(name, selector))]
    wanted = set(prefixes)
    chosen = [name for name in names if name in wanted or _has_prefix(name, wanted)]
    if not chosen:
        raise _nothing(model, selector, flag)
    return chosen


def _prefixes(model: nn.Module, selector: str) -> list[str]:
    towers: Mapping[str, list[str]] = model.towers() if hasattr(model, "towers") else {}
    paths = {path for path, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    return [selector] if selector in paths else list(towers.get(selector, []))


def _has_prefix(name: str, prefixes: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in prefixes for end in range(1, len(parts)))


def _nothing(model: nn.Module, selector: str, flag: str, also: Iterable[str] = ()) -> UserError:
    known = {path for path, _ in model.named_modules() if path} | set(getattr(model, "towers", dict)()) | set(also)
    known |= {name for name, _ in model.named_parameters()}
    close = nearest(selector, known)
    tops = sorted({path.split(".")[0] for path in known})
    hint = f"did you mean {' or '.join(close)}?" if close else f"top-level names are {', '.join(tops)}."
    return UserError(f"{flag}: '{selector}' matches no {'module' if also else 'parameter'} of the model; {hint}")


def module_names(model: nn.Module, selector: str, flag: str) -> list[str]:
    """Paths of the modules that `selector` means: an exact path, a tower's modules, a pattern, or a last name
    (``q_proj`` means every module whose path ends in it). Raises UserError when there is none."""
    paths = [path for path, _ in model.named_modules() if path]
    chosen = _prefixes(model, selector)
    if not chosen:
        chosen = [path for path in paths if fnmatchcase(path, selector) or path.endswith("." + selector)]
    if not chosen:
        raise _nothing(model, selector, flag, {path.rsplit(".", 1)[-1] for path in paths})
    return chosen


def split_names(text: str | None) -> list[str]:
    """``a, b`` → [a, b]; None and empty text give []."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def frozen_names(model: nn.Module, freeze: str | None) -> list[str]:
    """Parameters that `--freeze-modules` freezes, without changing the model."""
    chosen: dict[str, None] = {}
    for selector in split_names(freeze):
        chosen.update(dict.fromkeys(parameter_names(model, selector, "--freeze-modules")))
    return list(chosen)


def freeze(model: nn.Module, names: list[str]) -> None:
    """Stops the named parameters from training."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)


# ---------------------------------------------------------------------------------------------------- groups


def parse_lr_group(text: str | None) -> list[tuple[str, float, float | None]]:
    """``path=lr,path=lr:floor`` → [(path, lr, floor or None)] in order. UserError on anything else."""
    rules = []
    for part in split_names(text):
        path, equals, value = part.rpartition("=")
        rate, _, floor = value.partition(":")
        try:
            rule = (path.strip(), float(rate), float(floor) if floor else None)
        except ValueError:
            rule = ("", 0.0, None)
        if not equals or not rule[0] or rule[1] < 0 or (rule[2] or 0.0) < 0:
            raise UserError(f"--lr-group: '{part}' must read path=lr or path=lr:floor, like vision=1e-5.")
        rules.append(rule)
    return rules


def build_groups(
    model: nn.Module,
    *,
    lr: float,
    floor: float,
    weight_decay: float,
    lr_group: str | None = None,
    decay_grouping: str = "all",
) -> list[Group]:
    """Parameter groups of the trainable parameters.

    Rules of `lr_group` are tried in order and the first that matches a parameter takes it, so a submodule
    stands before its parent; the rest is the group ``base``. A rule without a floor of its own has `floor`,
    or its rate where that is lower. With `decay_grouping` ``bias_norm``, each group's biases and norm
    weights form a second group ``<name>.no_decay`` without weight decay.

    Raises:
        UserError: a path matches nothing, or everything it matches was taken by earlier rules.
    """
    rules = [*parse_lr_group(lr_group), ("", lr, floor)]
    free = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups: list[Group] = []
    for path, rate, own_floor in rules:
        taken = [n for n in parameter_names(model, path, "--lr-group") if n in free] if path else list(free)
        if path and not taken:
            raise UserError(
                f"--lr-group: '{path}' gets no parameter: all of its own are frozen or in an earlier group; "
                "a submodule must stand before its parent."
            )
        params = {name: free.pop(name) for name in taken}
        low = min(floor if own_floor is None else own_floor, rate)
        groups += _by_decay(model, path or "base", rate, low, weight_decay, params, decay_grouping)
    return [group for group in groups if group.params]


def build_groups_of(args: TrainingArgs, model: nn.Module) -> list[Group]:
    """Freezes what the flags freeze and sorts the rest into groups: on the plain model, by its own names."""
    freeze(model, frozen_names(model, args.freeze_modules))
    return build_groups(
        model,
        lr=args.lr_base,
        floor=args.min_lr,
        weight_decay=args.weight_decay,
        lr_group=args.lr_group,
        decay_grouping=args.weight_decay_grouping,
    )


def rebind(groups: Sequence[Group], model: nn.Module) -> list[Group]:
    """The same groups over the parameters that `model` has now: after lowering, which packs some together,
    and after wrapping, which may replace them. Names are those of the present parameters.

    Raises:
        ValueError: parameters of different groups were packed together.
    """
    owner = {name: number for number, group in enumerate(groups) for name in group.params}
    parts = packed_parts(model)
    bound: list[dict[str, nn.Parameter]] = [{} for _ in groups]
    for raw, param in model.named_parameters():
        name = canonical(raw)
        numbers = {owner.get(member) for member in ([p.name for p in parts[name]] if name in parts else [name])}
        if len(numbers) > 1:
            raise ValueError(f"'{name}' was packed from parameters of different groups")
        number = numbers.pop()
        if number is not None and param.requires_grad:
            bound[number][name] = param
    return [replace(group, params=params) for group, params in zip(groups, bound) if params]


def _by_decay(
    model: nn.Module,
    name: str,
    lr: float,
    floor: float,
    decay: float,
    params: dict[str, nn.Parameter],
    grouping: str,
) -> list[Group]:
    if grouping == "all":
        return [Group(name, lr, floor, decay, params)]
    exempt = {key: value for key, value in params.items() if _is_bias_or_norm(model, key)}
    kept = {key: value for key, value in params.items() if key not in exempt}
    return [Group(name, lr, floor, decay, kept), Group(f"{name}.no_decay", lr, floor, 0.0, exempt)]


def _is_bias_or_norm(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    kind = type(model.get_submodule(owner)).__name__.lower()
    return last == "bias" or last.endswith("_bias") or "norm" in kind
