"""Flow matching: the path, the target, masks that let nothing through, and Euler sampling."""

from __future__ import annotations

import pytest
import torch

from vlaforge.models.action.flow import FlowMix, MaskedSquares, euler, squares


@pytest.fixture
def parts():
    g = torch.Generator().manual_seed(0)
    noise, actions, velocity = (torch.randn(3, 4, 5, generator=g) for _ in range(3))
    mask = torch.rand(3, 4, 5, generator=g) > 0.4
    return noise, actions, velocity, mask, torch.tensor([0.0, 0.25, 1.0])


def test_the_path_runs_from_actions_to_noise(parts):
    noise, actions, _, mask, time = parts
    x, target = FlowMix()(noise, actions, mask, time)
    real = actions * mask
    torch.testing.assert_close(x, time[:, None, None] * noise + (1 - time[:, None, None]) * real)
    assert torch.equal(x[0], real[0]) and torch.equal(x[2], noise[2]) and torch.equal(target, noise - real)


def test_the_path_towards_data_is_the_same_line_the_other_way(parts):
    noise, actions, _, mask, time = parts
    there, target = FlowMix()(noise, actions, mask, time)
    back, opposite = FlowMix("data")(noise, actions, mask, 1 - time)
    torch.testing.assert_close(back, there)
    assert torch.equal(opposite, -target)


def test_the_loss_is_the_squared_error_of_the_velocity(parts):
    noise, actions, velocity, mask, time = parts
    _, target = FlowMix()(noise, actions, mask, time)
    losses = squares(velocity, target, mask)
    torch.testing.assert_close(losses, (noise - actions - velocity).square() * mask)
    total, count = MaskedSquares()(velocity, target, mask)
    assert total == losses.sum() and count == mask.sum()


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_what_stands_outside_the_mask_changes_no_bit(parts, garbage):
    noise, actions, velocity, mask, time = parts
    dirty = torch.where(mask, actions, torch.tensor(garbage))
    velocity = velocity.clone().requires_grad_()
    (clean_x, clean_target), (dirty_x, dirty_target) = (FlowMix()(noise, a, mask, time) for a in (actions, dirty))
    assert torch.equal(clean_x, dirty_x) and torch.equal(clean_target, dirty_target)
    clean_loss, dirty_loss = (MaskedSquares()(velocity, t, mask)[0] for t in (clean_target, dirty_target))
    assert torch.equal(clean_loss, dirty_loss)
    gradients = [torch.autograd.grad(loss, velocity)[0] for loss in (clean_loss, dirty_loss)]
    assert torch.equal(*gradients) and gradients[0][~mask].eq(0).all()


def test_euler_integrates_from_noise_to_actions():
    noise = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    seen = []

    def velocity(x, time):
        seen.append(time.clone())
        return torch.ones_like(x) * 2.0

    torch.testing.assert_close(euler(velocity, noise, 4), noise - 2.0)
    assert torch.equal(torch.stack(seen)[:, 0], torch.tensor([1.0, 0.75, 0.5, 0.25]))
    torch.testing.assert_close(euler(lambda x, time: x, noise, 2000), noise / torch.e, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="at least one step"):
        euler(velocity, noise, 0)
