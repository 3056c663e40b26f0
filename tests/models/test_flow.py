"""Flow matching: the path, the target, masks that let nothing through, and Euler sampling."""

from __future__ import annotations

import pytest
import torch

from vlaforge.models.action.flow import euler, flow_loss, flow_mix


@pytest.fixture
def parts():
    g = torch.Generator().manual_seed(0)
    noise, actions, velocity = (torch.randn(3, 4, 5, generator=g) for _ in range(3))
    mask = torch.rand(3, 4, 5, generator=g) > 0.4
    return noise, actions, velocity, mask, torch.tensor([0.0, 0.25, 1.0])


def test_the_path_runs_from_actions_to_noise(parts):
    noise, actions, _, mask, time = parts
    x = flow_mix(noise, actions, mask, time)
    real = actions * mask
    torch.testing.assert_close(x, time[:, None, None] * noise + (1 - time[:, None, None]) * real)
    assert torch.equal(x[0], real[0]) and torch.equal(x[2], noise[2])


def test_the_loss_is_the_squared_error_of_the_velocity(parts):
    noise, actions, velocity, mask, _ = parts
    loss = flow_loss(velocity, noise, actions, mask)
    torch.testing.assert_close(loss, (noise - actions - velocity).square() * mask)


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_what_stands_outside_the_mask_changes_no_bit(parts, garbage):
    noise, actions, velocity, mask, time = parts
    dirty = torch.where(mask, actions, torch.tensor(garbage))
    velocity = velocity.clone().requires_grad_()
    assert torch.equal(flow_mix(noise, actions, mask, time), flow_mix(noise, dirty, mask, time))
    clean_loss, dirty_loss = (flow_loss(velocity, noise, a, mask) for a in (actions, dirty))
    assert torch.equal(clean_loss, dirty_loss)
    gradients = [torch.autograd.grad(loss.sum(), velocity)[0] for loss in (clean_loss, dirty_loss)]
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
