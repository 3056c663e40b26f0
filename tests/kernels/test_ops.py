"""What an op's own tables cannot say: agreement with others' definitions, shapes that are refused, long updates."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlaforge.data import images
from vlaforge.kernels import adamw as adamw_op
from vlaforge.kernels import addresses
from vlaforge.kernels.ada_norm import ada_norm
from vlaforge.kernels.adamw import adamw
from vlaforge.kernels.addresses import Addresses
from vlaforge.kernels.gated_residual import gated_residual
from vlaforge.kernels.glu import geglu, glu, swiglu
from vlaforge.kernels.image_prep import centred, image_prep
from vlaforge.kernels.linear_cross_entropy import linear_cross_entropy
from vlaforge.kernels.masked_mse import masked_mse
from vlaforge.kernels.rms_norm import rms_norm
from vlaforge.kernels.rotary import rotary
from vlaforge.kernels.spec import KernelError
from vlaforge.kernels.square_sums import square_sums
from vlaforge.models.blocks import modulation as blocks
from vlaforge.models.blocks.norms import AdaRMSNorm, RMSNorm
from vlaforge.models.blocks.rotary import Rotary, rotary_table


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_norms_are_those_of_the_blocks() -> None:
    x, condition = normal(2, 6, 32), normal(2, 16, seed=1)
    for offset in (0.0, 1.0):
        block = RMSNorm(32, offset=offset)
        torch.nn.init.normal_(block.weight)
        torch.testing.assert_close(rms_norm(x, block.weight, plus_one=offset == 1.0), block(x))
    ada = AdaRMSNorm(32, 16)
    torch.nn.init.normal_(ada.dense.weight)
    scale, shift, gate = ada.modulation(condition)[:, None].chunk(3, dim=-1)
    normed, expected_gate = ada(x, condition)
    torch.testing.assert_close(ada_norm(x, scale, shift), normed)
    torch.testing.assert_close(gated_residual(x, normed, gate), x + normed * expected_gate)


def test_modulation_by_frame_is_that_of_the_blocks() -> None:
    x, y = normal(2, 12, 32), normal(2, 12, 32, seed=1)
    scale, shift = normal(2, 3, 32, seed=2), normal(2, 3, 32, seed=3)
    torch.testing.assert_close(ada_norm(x, scale, shift, kind="layer"), blocks.ModulatedLayerNorm(32)(x, scale, shift))
    torch.testing.assert_close(gated_residual(x, y, scale), blocks.GatedAdd()(x, y, scale))


@pytest.mark.parametrize(
    ("shape", "as_broadcast"),
    [
        ((32,), (32,)),
        ((2, 32), (2, 1, 1, 32)),
        ((2, 1, 32), (2, 1, 1, 32)),
        ((1, 3, 32), (1, 3, 1, 32)),
        ((2, 3, 32), (2, 3, 1, 32)),
        ((2, 3, 1, 32), (2, 3, 1, 32)),
        ((2, 12, 32), (2, 3, 4, 32)),
    ],
    ids=str,
)
def test_a_modulation_spreads_as_broadcasting_would(shape: tuple[int, ...], as_broadcast: tuple[int, ...]) -> None:
    x, gate = normal(2, 3, 4, 32), normal(*shape, seed=1)
    torch.testing.assert_close(gated_residual(x, x, gate), x + x * gate.view(as_broadcast))


def test_unequal_segments_by_index() -> None:
    x, scale, shift = normal(2, 7, 32), normal(2, 3, 32, seed=1), normal(2, 3, 32, seed=2)
    index = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    expected = ada_norm(x, scale[:, index], shift[:, index])
    torch.testing.assert_close(ada_norm(x, scale, shift, index=index), expected)


@pytest.mark.parametrize("shape", [(3, 32), (2, 5, 32), (2, 3, 16), (2, 4, 1, 32)], ids=str)
def test_a_modulation_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="modulation"):
        gated_residual(normal(2, 3, 4, 32), normal(2, 3, 4, 32), normal(*shape))


def test_gated_units() -> None:
    gate, up = normal(3, 5, 8), normal(3, 5, 8, seed=1)
    torch.testing.assert_close(geglu(gate, up), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(swiglu(torch.cat([gate, up], dim=-1)), F.silu(gate) * up)
    with pytest.raises(ValueError, match="'gelu' and 'silu'"):
        glu(gate, up, activation="relu")


def test_rotary_is_that_of_the_blocks_and_undone_by_its_negative() -> None:
    q_BHTK, positions = normal(2, 4, 6, 16), torch.arange(12).view(2, 6)
    cos, sin = rotary_table(positions, 16)
    turned = rotary(q_BHTK.transpose(1, 2), cos, sin)
    torch.testing.assert_close(turned.transpose(1, 2), Rotary()(q_BHTK, cos, sin))
    torch.testing.assert_close(rotary(turned, cos, -sin).transpose(1, 2), q_BHTK)
    with pytest.raises(ValueError, match="needs cos and sin"):
        rotary(q_BHTK, cos, sin)


def test_garbage_under_the_mask_changes_nothing() -> None:
    prediction, target = normal(2, 5, 4), normal(2, 5, 4, seed=1)
    mask = torch.tensor([[True, True, False, False, True], [True] * 5])
    clean = masked_mse(prediction, target, mask)
    target[0, 2:4], prediction[0, 2] = float("nan"), float("inf")
    assert all(map(torch.equal, masked_mse(prediction, target, mask), clean))
    assert clean[1] == 8 * 4


def test_cross_entropy_is_torchs() -> None:
    hidden, weight = normal(2, 5, 8).requires_grad_(), normal(11, 8, seed=1).requires_grad_()
    labels = torch.tensor([[1, 2, -100, 4, 10], [0, -100, 3, 3, 3]])
    total, count = linear_cross_entropy(hidden, weight, labels)
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(total, expected)
    assert count == 8


@pytest.mark.parametrize("source", [(480, 640), (37, 91), (224, 224)], ids=str)
def test_images_are_those_of_lerobots_float_path(source: tuple[int, int]) -> None:
    frames = torch.randint(256, (2, *source, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = images.resize_with_pad(images.to_float(frames), 224, 224) * 2 - 1
    torch.testing.assert_close(image_prep(frames, (224, 224)), expected, atol=2e-5, rtol=0)


def test_images_with_placements_are_those_of_the_data_side() -> None:
    frames = torch.randint(256, (3, 40, 60, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    whole = images.Placement.whole(40, 60)
    cropped = whole.crop(5, 4, 30, 50).resize(28, 28).rotate(7.0)
    placements = [cropped, whole.resize(20, 28).pad(0, 4, 28, 28), images.Placement.whole(40, 60).resize(28, 28)]
    params = torch.from_numpy(np.stack([p.vector() for p in placements]))
    params[0, 12:] = torch.tensor([0.8, 1.3, 0.45, 0.6])
    expected = images.sample_views(frames, params, (28, 28))
    torch.testing.assert_close(image_prep(frames, (28, 28), params), expected, atol=2e-6, rtol=0)


def test_the_default_placement_is_the_data_sides() -> None:
    inner_h, inner_w = images.fit(37, 91, 24, 32)
    left, top = images.margins(inner_w, 32, "centre")[0], images.margins(inner_h, 24, "centre")[0]
    placement = images.Placement.whole(37, 91).resize(inner_h, inner_w).pad(left, top, 24, 32)
    np.testing.assert_allclose(np.array(centred((37, 91), (24, 32)), np.float32), placement.vector(), rtol=1e-6)


def _train(update, steps: int = 6) -> list[Tensor]:
    """Weights after `steps` of `update(weights, grads, m, v, step)`."""
    weights = [normal(5, 7), normal(3, seed=1)]
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(steps):
        grads = [normal(*w.shape, seed=10 * step + i) for i, w in enumerate(weights)]
        update(weights, grads, m, v, step)
    return weights


def test_adamw_is_torchs_and_a_refused_step_is_none() -> None:
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    taken = torch.zeros(())

    def ours(weights, grads, m, v, step):
        ok = torch.tensor(step != 3)
        grads = [g * float("nan") for g in grads] if step == 3 else grads
        taken.add_(ok)
        scalars = {"lr": torch.tensor(1e-2, dtype=torch.float64), "scale": torch.tensor(0.5)}
        adamw(weights, grads, m, v, step=taken, ok=ok, **scalars, **options)

    leaves = [normal(5, 7).requires_grad_(), normal(3, seed=1).requires_grad_()]
    torchs = torch.optim.AdamW(leaves, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in (0, 1, 2, 4, 5):
        for i, leaf in enumerate(leaves):
            leaf.grad = 0.5 * normal(*leaf.shape, seed=10 * step + i)
        torchs.step()
    for got, expected in zip(_train(ours), leaves, strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6)


def test_sums_of_squares() -> None:
    tensors = [normal(5, 7), normal(3, seed=1), normal(4, 4, seed=2).T]
    torch.testing.assert_close(square_sums(tensors), torch.stack([t.square().sum() for t in tensors]))


def test_the_table_of_addresses() -> None:
    """Chunks in order, each with its tensor; the row says where the tensor lies and which chunk is its first."""
    tensors = [torch.zeros(20000), torch.zeros(5), torch.zeros(8192)]
    places = Addresses.of([tensors, tensors, []])
    assert places.owner.tolist() == [0, 0, 0, 1, 2] and places.chunks == 5
    addresses = torch.tensor([t.data_ptr() for t in tensors])
    assert torch.equal(places.table[:, 0], addresses) and torch.equal(places.table[:, 1], addresses)
    assert places.table[:, 2].tolist() == [0, 0, 0]
    assert places.table[:, 3].tolist() == [20000, 5, 8192] and places.table[:, 4].tolist() == [0, 3, 4]


def test_tables_of_captures_are_apart_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables of one shape in a capture, and a second capture: each its own memory, which nothing writes again."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(addresses, "_stores", {})
    monkeypatch.setattr(addresses, "_tables", OrderedDict())
    monkeypatch.setattr(addresses.Store, "LEAST", 64)
    parts = [[torch.zeros(20000), torch.zeros(5)] for _ in range(3)]
    eager = [Addresses.of([part]).table for part in parts]
    addresses.reserve(cpu)
    monkeypatch.setattr(addresses, "capturing", lambda device: True)
    first = [Addresses.of([part]).table for part in parts]
    assert all(map(torch.equal, first, eager))
    monkeypatch.setattr(addresses, "capturing", lambda device: False)
    addresses.reserve(cpu)
    monkeypatch.setattr(addresses, "capturing", lambda device: True)
    second = [Addresses.of([part]).table for part in parts]
    assert all(map(torch.equal, second, eager)) and all(map(torch.equal, first, eager))
    starts = [table.data_ptr() for table in (*first, *second)]
    assert len(set(starts)) == 6
    assert all((a - b) % 128 == 0 for a in starts for b in starts[:3] if abs(a - b) < 8 * 64)
    with pytest.raises(KernelError, match="take one optimiser step before"):
        while True:
            Addresses.of([parts[0]])
    with pytest.raises(KernelError, match="were not seen yet"):
        Addresses.of([[torch.zeros(77)]])


@pytest.mark.gpu
def test_adamw_in_a_captured_graph() -> None:
    """Gradients get other addresses in each capture; replays of two graphs take the steps that eager code takes."""
    weights = [normal(300, 70).cuda(), normal(13, seed=1).cuda()]
    grads = [normal(*w.shape, seed=2).cuda() for w in weights]
    m, v = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    scalars = {"lr": torch.tensor(1e-2).cuda(), "step": torch.zeros(()).cuda(), "scale": torch.ones(()).cuda()}
    ok = torch.ones((), dtype=torch.bool).cuda()

    def step() -> None:
        scalars["step"].add_(1)
        adamw(weights, [g * 1.0 for g in grads], m, v, ok=ok, **scalars)

    step()
    copies = [[t.clone() for t in part] for part in (weights, m, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            step()
    for old, new in zip((weights, m, v), copies, strict=True):
        torch._foreach_copy_(old, new)
    scalars["step"].fill_(1)
    for number, graph in enumerate(graphs):
        graph.replay()
        taken = torch.tensor(2.0 + number).cuda()
        adamw_op.reference(copies[0], grads, copies[1], copies[2], ok=ok, **{**scalars, "step": taken})
    for got, expected in zip(weights, copies[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
