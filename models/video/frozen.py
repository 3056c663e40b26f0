"""Frozen encoders that stay outside the model's parameters: found on disk, or random from a seed for tests.

They are built when first used, on the device of their input, take no part in checkpoints, wrappers or the optimiser,
and encode one sample at a time. So a sample's result does not depend on its batch, and a cache made ahead of time
holds, bit for bit, what the step would compute.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vlaforge.data.errors import UserError
from vlaforge.data.schema import Contract
from vlaforge.models.base import BlockGroup
from vlaforge.models.convert import Account, Layout, detect

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FrozenEncoder:
    """Base of the encoders. Subclasses say how to build the empty network and how its weights are named in public.

    Args:
        what: the encoder's name in messages.
        path: a weights file, or a folder that holds one of `files`; empty with a seed given.
        seed: random weights from this seed instead of a file.
        dtype: of weights and arithmetic.
        files: names looked for in a folder, best first.
        setting: dotted name of `path` in the configuration, for messages.
    """

    def __init__(self, what: str, path: str, seed: int | None, dtype: str, files: tuple[str, ...], setting: str):
        self.what, self.path, self.seed, self.files, self.setting = what, path, seed, files, setting
        self.dtype = DTYPES[dtype]
        self.account: Account | None = None
        """Where the weights came from, once they are loaded."""
        self._net: nn.Module | None = None
        self._empty: nn.Module | None = None

    def build(self) -> nn.Module:
        """The network without values (called on the meta device)."""
        raise NotImplementedError

    def layouts(self) -> dict[str, Layout]:
        """Public names of the weights ↔ the network's own."""
        raise NotImplementedError

    def net(self, device: torch.device | str) -> nn.Module:
        """The network on `device`, in evaluation mode and without gradients. UserError when weights are missing."""
        if torch.device(device).type == "meta":
            return self._shapes()
        if self._net is None:
            with torch.device("meta"):
                net = self.build()
            self._load(net, read_state(self.file()) if self.path else random_state(net, self._checked_seed()))
            self._net = net.eval().requires_grad_(False)
        if next(self._net.parameters()).device != torch.device(device):
            self._net = self._net.to(device)
        return self._net

    def _shapes(self) -> nn.Module:
        """The network on the meta device, for estimates of cost and memory: no weights are read for it."""
        if self._empty is None:
            with torch.device("meta"):
                net = self.build()
            self._empty = nn.Module.to(net, self.dtype).eval().requires_grad_(False)
        return self._empty

    def file(self) -> Path:
        """The weights file. UserError naming the setting when there is none."""
        given = Path(self.path).expanduser()
        if given.is_dir():
            for name in self.files:
                if (given / name).is_file():
                    return given / name
            raise UserError(f"{self.setting} '{given}' holds none of {', '.join(self.files)} ({self.what}).")
        if not given.is_file():
            raise UserError(
                f"{self.setting} '{given}' does not exist: give the weights of the {self.what}, or a folder."
            )
        return given

    def check(self) -> None:
        """UserError now, rather than in the first step, when the weights cannot be found."""
        self.file() if self.path else self._checked_seed()

    def _checked_seed(self) -> int:
        if self.seed is None:
            raise UserError(
                f"{self.setting} is empty: give the weights of the {self.what} ({' or '.join(self.files)})."
            )
        return self.seed

    def _load(self, net: nn.Module, official: Mapping[str, Tensor]) -> None:
        """A file's tensors into the empty `net`, strictly, whichever of the layouts they are in."""
        shapes = {name: value.shape for name, value in net.state_dict().items()}
        state, self.account = detect(self.layouts(), official).load(official, shapes)
        state = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in state.items()}
        net.load_state_dict(state, strict=True, assign=True)


class EncoderModel(nn.Module):
    """A frozen encoder with what plan and `forge-parity` ask of a model: a contract, repeated blocks, a name.

    Args:
        blocks: container → paths of its blocks in this module (the network is ``net``).
    """

    def __init__(self, family: str, encoder: FrozenEncoder, blocks: Mapping[str, tuple[str, ...]]):
        super().__init__()
        self.family, self.encoder, self.config = family, encoder, encoder
        self.net = encoder.net("cpu")
        self._blocks = blocks

    @staticmethod
    def contract(config: FrozenEncoder) -> Contract:
        return Contract({}, {})

    def blocks(self) -> list[BlockGroup]:
        return [BlockGroup(path, names) for path, names in self._blocks.items()]


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors of a ``.safetensors`` file (or its ``.index.json``), or of a ``.pth`` read as plain tensors only."""
    if path.name.endswith(".index.json"):
        shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        return {name: value for shard in shards for name, value in read_state(path.parent / shard).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def random_state(net: nn.Module, seed: int) -> dict[str, Tensor]:
    """Values for every tensor of `net` from (seed, its name): N(0, 0.8/√fan_in), gains of 1, biases of 0.

    They do not depend on library versions or on the order of construction.
    """
    state = {}
    for name, empty in net.state_dict().items():
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        if name.endswith("bias"):
            state[name] = torch.zeros(empty.shape)
        elif empty.numel() == empty.shape[0] and not name.endswith("embedding.weight"):
            state[name] = torch.ones(empty.shape)
        else:
            fan_in = math.prod(empty.shape[1:])
            state[name] = torch.randn(empty.shape, generator=generator) * (0.8 / math.sqrt(fan_in))
    return state
