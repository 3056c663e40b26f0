"""The C loops of a CPU against the plain formula."""

from __future__ import annotations

import pytest
import torch

from vlaforge.data.statistics import cache_folder
from vlaforge.kernels import native
from vlaforge.kernels.adamw import reference

SHAPES = [(native.CHUNK + 3,), (3, native.CHUNK), (33, 7), (), (64,)]
FIXED = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "ema_decay": 0.99}


def numbers(lr: float, step: int, scale: float = 1.0, ok: bool = True, **changed: float) -> dict:
    """Arguments beside the tensors."""
    scalars = {"lr": torch.tensor(lr, dtype=torch.float64), "step": torch.tensor(float(step))}
    return {**scalars, "scale": torch.tensor(scale), "ok": torch.tensor(ok), **FIXED, **changed}


@pytest.fixture(scope="module")
def loops():
    if native.compiler() is None:
        pytest.skip("no C compiler")
    return native.Native(cache_folder() / "native")


def lists(low: bool, ema: bool) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def normal(size: float) -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator) * size for shape in SHAPES]

    weights, grads = normal(0.02), normal(1e-3)
    return {
        "weights": weights,
        "grads": [g.bfloat16() for g in grads] if low else grads,
        "exp_avgs": normal(1e-3),
        "exp_avg_sqs": [v.square() for v in normal(1e-3)],
        "params": [w.bfloat16() for w in weights] if low else [],
        "ema": normal(0.02) if ema else [],
    }


def copies(tensors: dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    return {name: [x.clone() for x in part] for name, part in tensors.items()}


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("low", [False, True])
def test_adamw_is_the_formula(loops, low, ema):
    ours, theirs = lists(low, ema), lists(low, ema)
    loops.adamw(**ours, **numbers(1e-2, 3, 0.37))
    reference(**theirs, **numbers(1e-2, 3, 0.37))
    before = copies(ours)
    loops.adamw(**ours, **numbers(1e-2, 4, float("nan"), ok=False))
    assert all(torch.equal(a, b) for name, part in ours.items() for a, b in zip(part, before[name]))
    for name, part in ours.items():
        for a, b in zip(part, theirs[name], strict=True):
            torch.testing.assert_close(a, b, rtol=8e-3 if a.dtype == torch.bfloat16 else 2e-6, atol=1e-7)
    assert all(torch.equal(p, w.bfloat16()) for p, w in zip(ours["params"], ours["weights"]))


def test_threads_do_not_change_the_numbers(loops, monkeypatch):
    given, results = lists(True, True), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        made = copies(given)
        loops.adamw(**made, **numbers(1e-2, 1))
        results.append([*(x for part in made.values() for x in part), loops.square_sums(made["weights"])])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_copies_round_as_torch_does(loops):
    """Ties, what is not finite, and the largest values."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x00000001, 0x3F808001])
    weight = bits.to(torch.int32).view(torch.float32)
    weight = torch.cat([weight, -weight])
    zeros = [torch.zeros_like(weight) for _ in range(2)]
    param, grad = weight.bfloat16(), torch.zeros(len(weight), dtype=torch.bfloat16)
    param.zero_()
    loops.adamw([weight], [grad], zeros[:1], zeros[1:], [param], [], **numbers(0.0, 1))
    torch.testing.assert_close(param, weight.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("low", [False, True])
def test_sums_of_squares(loops, low):
    tensors = [*lists(low, False)["grads"], torch.randn(5, 300).T.to(torch.bfloat16)]
    want = torch.stack([x.double().square().sum() for x in tensors]).float()
    torch.testing.assert_close(loops.square_sums(tensors), want, rtol=1e-5, atol=0)
    for odd in (float("inf"), float("nan")):
        tensors[1].view(-1)[-1] = odd
        assert torch.isfinite(loops.square_sums(tensors)).tolist() == [i != 1 for i in range(len(tensors))]


def test_what_fits():
    w, low = torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16)
    assert native.fits(w, low, w, w, low, w) and native.fits(w, w, w, w, w, w)
    turned = torch.zeros(6, 4).T
    assert native.fits(turned, turned, turned, turned, turned, turned)
    assert not native.fits(w, low.T.contiguous().T, w, w, low, w)
    assert not native.fits(low, low, low, low, low, low) and not native.fits(w, w.half(), w, w, w, w)
    assert native.readable(turned) and not native.readable(w[:, :3]) and not native.readable(w.to("meta"))


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(native.NotBuilt, match="no C compiler was found"):
        native.Native(tmp_path)
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho 'native.c: broken' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    with pytest.raises(native.NotBuilt, match=r"native\.c: broken"):
        native.Native(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
