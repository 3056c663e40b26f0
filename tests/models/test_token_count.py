"""Every family says how many sequence positions a batch puts through its blocks, for tokens/s and MFU."""

import pytest
import torch

from vlaforge import models
from vlaforge.data.collate import trimmed
from vlaforge.data.schema import make_draw
from vlaforge.runtime.config import resolve

NAMES = [name for name in models.available() if "tiny" in models.family(name).presets()]


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name):
    """Linear in the samples, no more once padding is cut, and between what the last blocks see and what all see."""
    family = models.family(name)
    config = resolve(["--model", name, "--preset", "tiny"]).model_config
    contract = family.model.contract(config)
    model = family.model(config).eval()
    batch = contract.synthetic(2, seed=1)
    count = model.token_count(batch)
    assert count > 0 and model.token_count(contract.synthetic(4, seed=1)) == 2 * count
    for trim in contract.trims:
        batch[trim.mask][:, 1:] &= trim.keep == "suffix"
    assert model.token_count(trimmed(batch, contract.trims)) <= count
    seen: dict[str, list[int]] = {}
    for group in model.blocks():
        block = model.get_submodule(group.names[0])

        def look(module, args, path=group.path):
            seen[path] = [x.shape[0] * x.shape[1] for x in args if isinstance(x, torch.Tensor) and x.dim() == 3]

        block.register_forward_pre_hook(look)
    draw = make_draw(contract.draws, range(2), seed=0, epoch=0)
    with torch.no_grad():
        model.loss(contract.synthetic(2, seed=1), draw)
    last = seen[model.blocks()[-1].path][0]
    assert last <= count <= sum(sum(positions) for positions in seen.values())
