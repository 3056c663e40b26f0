"""A second process in which Triton's interpreter is on.

The switch is read when kernels are defined, and must not reach the other tests (they compile for real), so the
interpreter lives in a process of its own, one for each test worker, and gets work as (function, arguments).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """``interpreted(function, *args)``: the result (or exception) of a module's function with the interpreter on."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    try:
        pool.submit(os.getpid).result()  # the process starts now, while the switch is set
        os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
        yield lambda function, *args: pool.submit(function, *args).result()
    finally:
        pool.shutdown()
