"""hoist: modulations of all blocks in one product; keys and values of the blocks that read one context too."""

import pytest
import torch

from vlaforge.graphs.packing import packed_parts
from vlaforge.runtime.lora import LoraConfig, inject

SITES = {
    # 6 blocks and the output; block 0 and 4 read the text, block 2 the images.
    "groot_n1_7": {
        "head.dit.conditions": ("modulations", 7),
        "head.dit.text_keys": ("keys_values", 4),
        "head.dit.image_keys": ("keys_values", 2),
    },
    # 3 layers of each expert read the text.
    "fastwam": {"video_keys": ("keys_values", 6), "action_keys": ("keys_values", 6)},
}


def gradients(model, minibatch):
    losses = model(minibatch.batch, minibatch.draw)
    losses.total().backward()
    parts = packed_parts(model)
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            rows = parts.get(name, ())
            found |= {part.name: parameter.grad[part.start : part.stop] for part in rows} or {name: parameter.grad}
    return losses.total().detach(), found


@pytest.mark.parametrize("tiny", SITES, indirect=True)
def test_one_product_for_each_shared_input(tiny):
    plain, model = tiny.model(), tiny.model()
    plan = tiny.only(model, "hoist")
    expected = SITES[tiny.name]
    assert {site.path: site.what for site in plan.entry("hoist").sites} == {
        p: what for p, (what, _) in expected.items()
    }
    plan.lower(model)
    assert {name: len(parts) for name, parts in packed_parts(model).items() if name.endswith("weight")} == {
        f"{place}.packed.weight": count for place, (_, count) in expected.items()
    }
    minibatch = tiny.batch(0)
    (loss, one), (other, all_) = gradients(plain, minibatch), gradients(model, minibatch)
    assert float(loss) == pytest.approx(float(other), rel=1e-6) and one.keys() == all_.keys()
    for name in one:
        torch.testing.assert_close(all_[name], one[name], rtol=1e-4, atol=1e-6, msg=name)
    obs = {name: value for name, value in minibatch.batch.items() if tiny.contract.fields[name].observation}
    sampled = [m.eval().act(type(minibatch.batch)(obs), minibatch.draw, 2) for m in (plain, model)]
    torch.testing.assert_close(*sampled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tiny", ["groot_n1_7"], indirect=True)
def test_what_cannot_be_joined_stays(tiny):
    model = tiny.model()
    inject(model, LoraConfig(r=2, targets=("head.dit.blocks.*.attn.k_proj",)))
    sites = [site.path for site in tiny.only(model, "hoist").entry("hoist").sites]
    assert sites == ["head.dit.conditions"]
    assert "would not be sharded" in tiny.plan(tiny.model(), world=2, strategy="fsdp").entry("hoist").reason
