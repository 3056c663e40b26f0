"""LoRA: low-rank adapters beside the weights of any linear, embedding or convolution (files: `runtime.adapter`).

    y = W x + b + (alpha / r) · B A dropout(x)         A is random, B is zero: at the start nothing changes

An adapted module keeps its class's attributes and parameter names (``q_proj.weight``); the adapter stands beside
them (``q_proj.lora_A.weight``, ``q_proj.lora_B.weight``). So checkpoints, freezing, rates and wrappers work as
before, and blocks compile as before. Passes that would compute with a module's weight by themselves look at the exact
class and leave adapted modules alone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError, unknown
from vlaforge.models.blocks.linear import Multiplying
from vlaforge.runtime.params import canonical, module_names, parameter_names

INITS = ("true", "false", "gaussian")


@dataclass(frozen=True)
class LoraConfig:
    """What is adapted and how.

    Args: r, alpha: rank, and the numerator of the scale. dropout: on the adapter's input, in training. targets:
        selectors of modules (path, tower, pattern, last name); empty means every linear of the repeated blocks.
        save: selectors of parameters that train whole and are kept with the adapter. bias: ``none``, ``lora_only``
        (of adapted modules) or ``all`` train too. init: ``true`` (Kaiming A, zero B), ``gaussian`` (A with
        deviation 1/r, zero B) or ``false`` (B random too). rslora: scale by alpha / √r.
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    save: tuple[str, ...] = ()
    bias: str = "none"
    init: str = "true"
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


# ---------------------------------------------------------------------------------------- modules


class LoraLinear(Multiplying, nn.Linear):
    """A linear with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        added = self.lora_B(self.lora_A(self.lora_dropout(x)))
        return self.product(x, self.weight, self.bias) + self.lora_scale * added

    def delta(self) -> Tensor:
        """What the adapter adds to the weight, fp32."""
        return self.lora_scale * self.lora_B.weight.float() @ self.lora_A.weight.float()


class LoraEmbedding(nn.Embedding):
    """An embedding with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_scale * self.lora_B(self.lora_A(x))

    def delta(self) -> Tensor:
        return self.lora_scale * (self.lora_B.weight.float() @ self.lora_A.weight.float().T).T


class LoraConv2d(nn.Conv2d):
    """A convolution with an adapter: A has its kernel and stride, B is pointwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_scale * self.lora_B(self.lora_A(self.lora_dropout(x)))

    def delta(self) -> Tensor:
        product = self.lora_B.weight.float().flatten(1) @ self.lora_A.weight.float().flatten(1)
        return self.lora_scale * product.reshape(self.weight.shape)


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LoraLinear,
    nn.Embedding: LoraEmbedding,
    nn.Conv2d: LoraConv2d,
}
ADAPTED = tuple(KINDS.values())


def _pair(module: nn.Module, r: int) -> tuple[nn.Module, nn.Module]:
    """A and B for `module`, with fresh values."""
    where = {"device": module.weight.device, "dtype": module.weight.dtype}
    if isinstance(module, nn.Linear):
        return (
            nn.Linear(module.in_features, r, bias=False, **where),
            nn.Linear(r, module.out_features, bias=False, **where),
        )
    if isinstance(module, nn.Embedding):
        a = nn.Embedding(module.num_embeddings, r, **where)
        return a, nn.Linear(r, module.embedding_dim, bias=False, **where)
    a = nn.Conv2d(
        module.in_channels, r, module.kernel_size, module.stride, module.padding, module.dilation, bias=False, **where
    )
    return a, nn.Conv2d(r, module.out_channels, 1, bias=False, **where)


def _adapt(module: nn.Module, config: LoraConfig) -> None:
    kind = KINDS[type(module)]
    a, b = _pair(module, config.r)
    _initialise(a, b, config)
    module.__class__ = kind
    module.lora_A, module.lora_B, module.lora_scale = a, b, config.scale
    module.lora_dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()


def _initialise(a: nn.Module, b: nn.Module, config: LoraConfig) -> None:
    if config.init not in INITS:
        raise unknown("LoRA initialisation", config.init, INITS)
    if config.init == "gaussian":
        nn.init.normal_(a.weight, std=1 / config.r)
    elif isinstance(a, nn.Embedding):
        nn.init.normal_(a.weight)
    else:
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
    if config.init != "false":
        nn.init.zeros_(b.weight)


# ---------------------------------------------------------------------------------------- model


def inject(model: nn.Module, config: LoraConfig) -> list[str]:
    """Adapts `model` in place and freezes everything but adapters, `save` and biases; returns the adapted paths.

    Raises:
        UserError: a selector matches nothing, or no module of a kind that can be adapted; the model has adapters.
    """
    if adapted(model):
        raise UserError("The model has LoRA adapters already: a second set would train beside the first.")
    chosen = _targets(model, config)
    saved = [name for selector in config.save for name in parameter_names(model, selector, "--lora-modules-to-save")]
    model.requires_grad_(False)
    for path in chosen:
        module = model.get_submodule(path)
        _adapt(module, config)
        module.lora_A.requires_grad_(True)
        module.lora_B.requires_grad_(True)
    for name in saved:
        model.get_parameter(name).requires_grad_(True)
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        inside = isinstance(model.get_submodule(owner), ADAPTED)
        if leaf == "bias" and (config.bias == "all" or (config.bias == "lora_only" and inside)):
            parameter.requires_grad_(True)
    return chosen


def _targets(model: nn.Module, config: LoraConfig) -> list[str]:
    if config.targets:
        roots = [path for selector in config.targets for path in module_names(model, selector, "--lora-target-modules")]
    else:
        roots = [name for group in model.blocks() for name in group.names]
    kinds = tuple(KINDS) if config.targets else (nn.Linear,)
    below = {
        f"{root}.{name}" if name else root
        for root in roots
        for name, module in model.get_submodule(root).named_modules()
        if type(module) in kinds
    }
    if not below:
        named = ", ".join(config.targets) or "the repeated blocks"
        raise UserError(f"--lora-target-modules: {named} hold no linear, embedding or convolution to adapt.")
    return [path for path, _ in model.named_modules() if path in below]


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Path → module of everything that has an adapter."""
    return {canonical(path): module for path, module in model.named_modules() if isinstance(module, ADAPTED)}


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Adds each adapter to its weight (in fp32, rounded once) and takes it off; outputs stay the same."""
    plain = {lora: base for base, lora in KINDS.items()}
    for module in adapted(model).values():
        module.weight.copy_((module.weight.float() + module.delta()).to(module.weight.dtype))
        module.__class__ = plain[type(module)]
        for name in ("lora_A", "lora_B", "lora_dropout"):
            delattr(module, name)
        del module.lora_scale


def fingerprint(model: nn.Module) -> str:
    """16 hex digits of the base: names, shapes and up to 1024 values of each frozen parameter, spread evenly."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            continue
        flat = parameter.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
        total.update(f"{canonical(name)} {tuple(parameter.shape)}".encode() + picked.tobytes())
    return total.hexdigest()[:16]
