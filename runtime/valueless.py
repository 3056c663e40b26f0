"""Running a model on shapes alone (the meta device), and knowing when values would be needed.

There torch has no one error for what it cannot know: a value that is read, a shape that depends on values, a copy to
the host, an op with a tensor on the host, an op without a formula for its shape. Inside `valueless` they all raise
`NeedsValues`, and every other error is a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
TO_NUMPY = (Tensor.numpy, Tensor.__array__)
"""What never becomes an op."""


class NeedsValues(Exception):
    """What ran on the meta device asked for values, which are not there."""


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:  # NotImplementedError among them
            devices = _devices((args, kwargs))
            unknown = UNKNOWN.intersection(func.tags) or isinstance(error, NotImplementedError) or len(devices) > 1
            if "meta" in devices and unknown:
                raise NeedsValues(f"{func} needs values") from error
            raise


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_NUMPY and "meta" in _devices(args):
            raise NeedsValues("an array of NumPy needs values")
        return func(*args, **(kwargs or {}))


def _devices(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


@contextmanager
def valueless() -> Iterator[None]:
    """Makes tensors on the meta device inside, and raises `NeedsValues` where values would be needed."""
    with torch.device("meta"), _Calls(), _Ops():
        yield
