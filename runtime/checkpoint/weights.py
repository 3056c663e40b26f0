"""Weights in and out of a model by canonical name, whatever wraps it, strictly and with an account.

Names are those of the plain model: segments that compile, recompute and DDP put in between are taken out. A
checkpoint in our own names is just one more layout beside the official ones (`models.convert`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.models import Family
from vlaforge.models.convert import Account, Layout, Rule, detect
from vlaforge.runtime.checkpoint import formats
from vlaforge.runtime.checkpoint.files import MANIFEST, fault
from vlaforge.runtime.checkpoint.tensors import TensorFiles
from vlaforge.runtime.params import canonical

OURS = "vlaforge"


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by canonical name; tied parameters appear under each of their names."""
    return {canonical(name): value.detach() for name, value in model.state_dict().items()}


def own_layout() -> Layout:
    """Our own names as a layout."""
    return Layout(OURS, (Rule("{rest}", "{rest}"),))


def load_model(
    model: nn.Module,
    stored: Mapping[str, Tensor],
    layout: Layout,
    new: Sequence[str] = (),
) -> Account:
    """Loads `stored` (names of `layout`) into `model`, strictly.

    `new` are patterns of parameters that keep their fresh values. Values take the parameter's dtype and
    device. In our own names, one name of a tied parameter is enough.

    Raises:
        UserError: missing or unexpected keys or other shapes, all named.
    """
    state = {canonical(name): value for name, value in model.state_dict().items()}
    partners = _partners(model) if layout.name == OURS else {}
    filled = {
        name: next(other for other in others if other in stored)
        for name, others in partners.items()
        if name not in stored and any(other in stored for other in others)
    }
    given = {**{name: stored[name] for name in stored}, **{n: stored[other] for n, other in filled.items()}}
    loaded, account = layout.load(given, {name: value.shape for name, value in state.items()}, new)
    account.tied.update(filled)
    account.loaded = [name for name in account.loaded if name not in filled]
    with torch.no_grad():
        for name, value in loaded.items():
            state[name].copy_(value)
    return account


def _partners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name → the other names of the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical(name))
    return {
        name: tuple(other for other in group if other != name)
        for group in names.values()
        if len(group) > 1
        for name in group
    }


# ------------------------------------------------------------------------------------------- files


def open_weights(path: Path | str, group: str = "model", check: bool = True) -> Mapping[str, Tensor]:
    """Tensors by name from anything that holds weights: a checkpoint of ours, a run's folder (its newest), a
    safetensors or pt file, a folder in Hugging Face's layout. `check` compares contents with their hashes.

    Raises:
        UserError: nothing is there, or it is damaged.
    """
    path = find_weights(path)
    if path.is_file():
        return formats.load_pt(path) if path.suffix in (".pt", ".pth", ".bin") else TensorFiles(path)
    if (path / MANIFEST).is_file() and (why := fault(path, hashes=check)) is not None:
        raise UserError(f"Checkpoint '{path}' is broken: {why}.")
    if (path / "adapter_config.json").is_file() and group == "model":
        raise UserError(
            f"'{path}' is a LoRA adapter, not a model: give the base with --pretrained-checkpoint and this with "
            "--use-lora --lora-adapter."
        )
    stored = formats.read(path, group)
    if stored is None:
        raise UserError(f"Checkpoint '{path}' holds no '{group}' weights.")
    return stored


def headers(path: Path | str) -> dict[str, Tensor]:
    """Names and shapes of the weights at `path`, as tensors on the meta device; no weight is read.

    Raises:
        UserError: as `open_weights`; contents are not compared with their hashes.
    """
    return formats.shapes(open_weights(path, check=False))


def check_pretrained(model: nn.Module, family: Family, path: Path | str, new: Sequence[str] = ()) -> Account:
    """`load_pretrained` on names and shapes alone, with `model` on the meta device. Another model's weights, which a
    family may start from, are only looked at when they are loaded."""
    if hasattr(family.part("convert"), "pretrained") and not _holds_weights(find_weights(path)):
        return Account("another model's weights")
    return load_model(model, *_in_layout(model, family, headers(path)), new)


def _holds_weights(path: Path) -> bool:
    try:
        return path.is_file() or bool(formats.format_of(path))
    except UserError:
        return False


def find_weights(path: Path | str) -> Path:
    """The file or folder that `path` means: itself, or the newest checkpoint of the run in it."""
    from vlaforge.runtime.checkpoint.store import Checkpoints

    path = Path(path).expanduser()
    if not path.exists():
        hub = len(path.parts) == 2 and not path.is_absolute()
        how = f", fetched with `hf download {path}` where it is a model on the Hugging Face hub" if hub else ""
        raise UserError(f"Checkpoint '{path}' does not exist: give a file of weights or a checkpoint's folder{how}.")
    if path.is_file():
        return path
    for folder in (path / "checkpoints", path):
        held = Checkpoints(folder).newest()
        if held is not None:
            return held[1]
    return path


def load_pretrained(model: nn.Module, family: Family, path: Path | str, new: Sequence[str] = ()) -> Account:
    """Loads weights in our own names or in any official layout of the family, found by its keys; or, where
    the family's `convert.pretrained` knows the folder, another model's weights as a start.

    Raises:
        UserError: nothing there, no layout knows the keys, or the weights do not fit (all faults named).
    """
    state = {canonical(name): value for name, value in model.state_dict().items()}
    foreign = getattr(family.part("convert"), "pretrained", None)
    if foreign is not None:
        found = foreign(Path(path).expanduser(), {name: value.shape for name, value in state.items()})
        if found is not None:
            with torch.no_grad():
                for name, value in found[0].items():
                    state[name].copy_(value)
            return found[1]
    return load_model(model, *_in_layout(model, family, open_weights(path)), new)


def _in_layout(model: nn.Module, family: Family, stored: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Layout]:
    """`stored`, and the layout that its keys are of: ours or an official one, whichever knows more of them."""
    ours = {canonical(name) for name in model.state_dict()} & set(stored)
    layouts = family.part("convert").LAYOUTS
    # A few names may be the same in both (FastWAM's proprio_encoder): the layout that knows more keys is meant.
    if len(ours) < max((one.recognised(stored) for one in layouts.values()), default=1):
        return stored, detect(layouts, list(stored))
    return stored, own_layout()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """12 hex digits of names, dtypes and values: the same for the same weights."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if value.numel():
            total.update(value.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()[:12]
