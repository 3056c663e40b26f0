"""Code that `torch.compile` makes for a CPU."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from vlaforge.kernels.compiler import cpu_options
from vlaforge.kernels.gelu import gelu

ROOT = Path(__file__).parents[2]
NOTHING = {"to", "float", "contiguous", "type_as"}
"""Methods that may hand a tensor back as it is."""


def ends(function: ast.FunctionDef) -> list[str]:
    """Names of the methods whose results it returns."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    calls = [call for call in returned if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)]
    return [call.func.attr for call in calls]


def test_no_gradient_is_lost_to_a_conversion_that_does_nothing():
    """In torch 2.11 dynamo makes the gradient of such an output of an autograd.Function zero, without a word."""
    functions = {}
    for path in [*ROOT.glob("kernels/**/*.py"), *ROOT.glob("models/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                forward = next(f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward")
                functions[f"{path.name}:{node.name}"] = ends(forward)
    assert len(functions) >= 10
    assert not {name: found for name, found in functions.items() if NOTHING & set(found)}


def three_parts(x_TD: torch.Tensor) -> list[torch.Tensor]:
    return [part_TW.t().contiguous() for part_TW in x_TD.split(64, dim=1)]


def test_a_projection_split_in_three():
    """Nearly every element was wrong where gcc 12.2 vectorised the transposition of bf16 tiles."""
    x = torch.randn(12544, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    compiled = torch.compile(three_parts, dynamic=False, options=cpu_options())
    for ours, eager in zip(compiled(x), three_parts(x), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("kind", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_is_as_exact_as_torch(kind, dtype):
    """Value and slope against fp64, or to the last place of the largest; far out they are those of max(x, 0)."""
    last_place = 2.0**-21 if dtype == torch.float32 else 0.0  # of 4 to 8
    far = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    x = torch.cat([torch.linspace(-8, 8, 200_001), far]).to(dtype).requires_grad_()

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=kind)

    compiled = torch.compile(lambda x: gelu(x, kind == "tanh"), dynamic=False, options=cpu_options())
    exact, ours, theirs = ((y := f(z), torch.autograd.grad(y.sum(), z)[0]) for f, z in (
        (by_torch, x.detach().double().requires_grad_()), (compiled, x), (by_torch, x)
    ))  # fmt: skip
    for want, got, other in zip(exact, ours, theirs, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= max(1.05 * (other - want).abs().max(), last_place)
        assert torch.equal(got[-4:], want[-4:].to(dtype))
    assert compiled(torch.full_like(x, torch.nan)).isnan().all()
