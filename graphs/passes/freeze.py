"""freeze: what does not train keeps no graph.

Frozen parameters lose `requires_grad`. A tower that is frozen whole runs without autograd whenever nothing that it is
given needs a gradient, stays in eval mode, and is marked (`_forge_frozen`), so that `overlap` may run it for the next
batch on a side stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.graphs.passes.base import Context, Decision, Pass, Site


def _needs_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (tuple, list)):
        return any(map(_needs_grad, value))
    if isinstance(value, dict):
        return any(map(_needs_grad, value.values()))
    return False


class FrozenForward:
    """A module's forward that records a graph only when an input asks for one."""

    def __init__(self, module: nn.Module):
        self.inner = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and _needs_grad((args, kwargs))):
            return self.inner(*args, **kwargs)


def frozen_names(model: nn.Module, context: Context) -> set[str]:
    """Parameters that do not train: named in the options, or without `requires_grad` already."""
    return {name for name, p in model.named_parameters() if name in context.options.frozen or not p.requires_grad}


def frozen_roots(model: nn.Module, context: Context) -> list[str]:
    """Topmost modules whose parameters are all frozen, in order of registration; the model itself is never one."""
    frozen = frozen_names(model, context)
    roots: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name == root or name.startswith(root + ".") for root in roots):
            continue
        own = [f"{name}.{key}" for key, _ in module.named_parameters()]
        if own and all(key in frozen for key in own) and type(module) not in (nn.ModuleList, nn.ModuleDict):
            roots.append(name)
    return roots


class Freeze(Pass):
    name = "freeze"
    numerics = "exact"
    order = 5

    def decide(self, model: nn.Module, context: Context) -> Decision:
        frozen = frozen_names(model, context)
        if not frozen:
            return Decision(False, "every parameter trains")
        total = sum(p.numel() for p in model.parameters())
        share = sum(p.numel() for name, p in model.named_parameters() if name in frozen) / max(total, 1)
        return Decision(True, f"{share:.0%} of the parameters: no graph, no gradient, no optimiser state")

    def sites(self, model: nn.Module, context: Context) -> list[Site]:
        roots = frozen_roots(model, context)
        inside = tuple(root + "." for root in roots)
        alone = [name for name in sorted(frozen_names(model, context)) if not name.startswith(inside)]
        return [Site(root, "module") for root in roots] + [Site(name, "parameter") for name in alone]

    def apply(self, target: nn.Module, sites: Sequence[Site], context: Context) -> None:
        for site in sites:
            if site.what == "parameter":
                target.get_parameter(site.path).requires_grad_(False)
                continue
            module = target.get_submodule(site.path)
            module.requires_grad_(False)
            module.eval()
            module._forge_frozen = True
            module.forward = FrozenForward(module)


def frozen_to_eval(model: nn.Module) -> None:
    """Puts marked modules back in eval mode; call it once after `model.train()`."""
    for module in model.modules():
        if getattr(module, "_forge_frozen", False):
            module.eval()
