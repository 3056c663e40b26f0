"""The shared parts of world-action models: schedules, rotary tables, structured masks, the Wan block, canvas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlaforge.data.errors import UserError
from vlaforge.models.action.schedule import ShiftedFlow
from vlaforge.models.convert import Layout
from vlaforge.models.video.block import WanBlock
from vlaforge.models.video.canvas import compose, cover, slots
from vlaforge.models.video.embed import Head, PatchEmbedding, TextEmbedding, TimeEmbedding, unpatch
from vlaforge.models.video.masks import VIDEO_RULES, Segment, attend, dense, frame_segments, plan
from vlaforge.models.video.names import WAN_DIT
from vlaforge.models.video.rope import axis_pairs, cached_table, rotate_pairs, table, video_positions

# ---------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("shift", [0.05, 1.0, 5.0])
def test_the_grid_is_the_shifted_line_and_its_weights_sum_to_its_length(shift):
    """Facts: sigma = s·u/(1+(s-1)u) over linspace(1, 0, 1001)[:-1]; weights sum to 1000, and are 0 at t = 1000."""
    flow = ShiftedFlow(shift)
    u = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    torch.testing.assert_close(torch.tensor(flow.grid, dtype=torch.float64), shift * u / (1 + (shift - 1) * u) * 1000)
    times = flow.grid_times(torch.arange(1000))
    assert times[0] == 1000 and (times[1:] < times[:-1]).all()
    weights = flow.weight(times)
    assert weights.sum().item() == pytest.approx(1000, rel=1e-5) and weights.min().item() == pytest.approx(0, abs=1e-6)
    y = torch.exp(-2 * ((times.double() - 500) / 1000) ** 2)
    torch.testing.assert_close(weights.double(), (y - y.min()) / (y - y.min()).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sample_shift", [None, 1.0, 7.0])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_sampling_walks_from_noise_to_data(count, sample_shift):
    flow = ShiftedFlow(5.0, sample_shift=sample_shift)
    times, deltas = flow.sampling(count)
    assert len(times) == len(deltas) == count and times[0] == 1000 and sum(deltas) == pytest.approx(-1)
    # A model that knows the answer lands on it, whatever the grid.
    clean, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    x = noise
    for delta in deltas:
        x = x + delta * (noise - clean)
    torch.testing.assert_close(x, clean, rtol=1e-5, atol=1e-5)


def test_noise_levels_broadcast_from_the_left():
    flow, clean, noise = ShiftedFlow(5.0), torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    time_BF = torch.tensor([[0.0, 500.0, 1000.0], [250.0, 0.0, 0.0]])
    x = flow.noised(clean, noise, time_BF)
    torch.testing.assert_close(x[0, 1], 0.5 * clean[0, 1] + 0.5 * noise[0, 1])
    assert torch.equal(x[0, 0], clean[0, 0]) and torch.equal(x[0, 2], noise[0, 2])
    assert torch.equal(flow.noised(clean, noise, torch.zeros(2)), clean)


def test_impossible_schedules_are_refused():
    for wrong in ({"shift": 0.0}, {"shift": -1.0}, {"sample_shift": 0.0}, {"steps": 0}):
        with pytest.raises(ValueError, match=r"shift|step"):
            ShiftedFlow(**wrong)
    with pytest.raises(ValueError, match="at least one step"):
        ShiftedFlow().sampling(0)


# ---------------------------------------------------------------------------------------------------- rotary


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_tables_turn_pairs_as_complex_numbers_do(head_dim):
    positions = video_positions([0, 1, 2.5], 2, 3, row_start=-1.0)
    cos, sin = table(positions, head_dim)
    x = torch.randn(2, len(positions), 4, head_dim)
    pairs = axis_pairs(head_dim)
    assert sum(pairs) == head_dim // 2 and pairs[1] == pairs[2] == head_dim // 6
    angle = torch.cat(
        [
            positions[:, axis, None] * 10000.0 ** -(torch.arange(n, dtype=torch.float64) / n)
            for axis, n in enumerate(pairs)
        ],
        dim=1,
    )
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.exp(1j * angle)[:, None]
    torch.testing.assert_close(rotate_pairs(x, cos, sin), torch.view_as_real(turned).flatten(-2).float())


def test_an_action_line_uses_the_whole_head():
    cos, sin = cached_table(5, 0, 0, 64, torch.device("cpu"))
    angle = torch.arange(5.0)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    torch.testing.assert_close(cos, angle.cos())
    torch.testing.assert_close(sin, angle.sin())


def test_a_table_first_made_while_sampling_serves_training():
    with torch.inference_mode():
        cos, _ = cached_table(2, 3, 7, 36, torch.device("cpu"))
    assert not cos.is_inference()
    assert cached_table(2, 3, 7, 36, torch.device("cpu"))[0] is cos


# ---------------------------------------------------------------------------------------------------- masks


def masked(q, k, v, mask):
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask
    )
    return out.transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_plan_is_masked_attention_for_any_rule(data):
    """Random segments of two streams, random visibility (everybody sees itself), some queries not wanted."""
    count = data.draw(st.integers(1, 6))
    segments = [
        Segment(data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["video", "action"])), chunk)
        for chunk in range(count)
    ]
    sees = data.draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count))
    wanted = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    calls = plan(
        segments, lambda q, k: q.chunk == k.chunk or sees[q.chunk * count + k.chunk], lambda s: wanted[s.chunk]
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    total = sum(segment.length for segment in segments)
    q, k, v = (torch.randn(2, total, 3, 8, generator=generator) for _ in range(3))
    expected = masked(q, k, v, dense(segments, lambda a, b: a.chunk == b.chunk or sees[a.chunk * count + b.chunk]))
    edges = torch.tensor([0] + [s.length for s in segments]).cumsum(0).tolist()
    rows = {m: [(edges[s.chunk], edges[s.chunk + 1]) for s in segments if s.modality == m] for m in ("video", "action")}

    def stream(x, keep=lambda chunk: True):
        found = {}
        for segment in segments:
            if keep(segment.chunk):
                found.setdefault(segment.modality, []).append(x[:, edges[segment.chunk] : edges[segment.chunk + 1]])
        return {name: torch.cat(parts, dim=1) for name, parts in found.items()}

    got = attend(calls, stream(q, lambda c: wanted[c]), stream(k), stream(v), lambda a, b, c: masked(a, b, c, None))
    want = stream(expected, lambda c: wanted[c])
    assert got.keys() == want.keys() and rows.keys() >= got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", VIDEO_RULES)
def test_video_masks(mode):
    frames, n = 3, 2
    mask = dense(frame_segments(frames, n), VIDEO_RULES[mode])
    frame = torch.arange(frames * n) // n
    query, key = frame[:, None], frame[None]
    assert torch.equal(
        mask,
        {
            "bidirectional": torch.ones_like(mask),
            "per_frame_causal": key <= query,
            "first_frame_causal": (query > 0) | (key == 0),
        }[mode],
    )


def test_few_calls_suffice_and_blind_queries_are_refused():
    calls = plan(frame_segments(9, 4), VIDEO_RULES["first_frame_causal"])
    assert [len(call.keys) for call in calls] == [1, 1] and calls[1].queries[0].stop - calls[1].queries[0].start == 32
    with pytest.raises(ValueError, match="look at nothing"):
        plan([Segment(2)], lambda query, key: False)


# ---------------------------------------------------------------------------------------------------- Wan's DiT


def test_the_parts_are_diffusers_wan_transformer():
    """A one-tower model of our parts, loaded through the name map, against an independent implementation."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    theirs = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=6, out_channels=6, text_dim=24,
        freq_dim=16, ffn_dim=96, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6,
        rope_max_seq_len=32,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = torch.nn.ModuleDict(
        {
            "patch_embedding": PatchEmbedding(6, 64, (1, 2, 2)),
            "text_embedding": TextEmbedding(24, 64),
            "time": TimeEmbedding(64, 16),
            "head": Head(64, 6, (1, 2, 2), 1e-6),
            "blocks": torch.nn.ModuleList(WanBlock(64, 96, 2, 32) for _ in range(2)),
        }
    )
    layout = Layout("diffusers", WAN_DIT)  # read backwards: our parts have the original's names
    renamed = {name.replace("time.embedding", "time_embedding"): value for name, value in ours.state_dict().items()}
    renamed = {name.replace("time.projection", "time_projection"): value for name, value in renamed.items()}
    renamed = {name.replace("qkv.", "").replace("_proj.", "."): value for name, value in renamed.items()}
    state, _ = layout.load(renamed, {name: value.shape for name, value in theirs.state_dict().items()})
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(theirs.state_dict()[name])
    latents, text = torch.randn(2, 6, 3, 4, 6), torch.randn(2, 5, 24)
    time_BF = torch.tensor([[0.0, 300.0, 300.0], [0.0, 871.0, 871.0]])
    with torch.no_grad():
        t, six = ours["time"](time_BF)
        x, context = ours["patch_embedding"](latents), ours["text_embedding"](text)
        for block in ours["blocks"]:
            x = block(x, six, context, *table(video_positions(3, 2, 3), 32))
        got = unpatch(ours["head"](x, t), (3, 2, 3), (1, 2, 2))
        # diffusers takes a time a token (Wan 2.2's image-to-video); ours one a frame.
        per_token = time_BF.repeat_interleave(6, dim=1)
        want = theirs(latents, per_token, text, return_dict=False)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_patches_and_their_way_back():
    latents = torch.randn(2, 3, 2, 4, 6)
    embed = PatchEmbedding(3, 12, (1, 2, 2))
    conv = torch.nn.functional.conv3d(latents, embed.weight, embed.bias, stride=(1, 2, 2))
    torch.testing.assert_close(embed(latents), conv.flatten(2).transpose(1, 2))
    pixels = latents.reshape(2, 3, 2, 2, 2, 3, 2).permute(0, 2, 3, 5, 4, 6, 1).reshape(2, 12, 12)
    assert torch.equal(unpatch(pixels, (2, 2, 3), (1, 2, 2)), latents)
    with pytest.raises(ValueError, match="do not split into patches"):
        embed(torch.randn(1, 3, 2, 5, 6))


# ---------------------------------------------------------------------------------------------------- canvas


def test_slots_fill_the_canvas_without_overlap():
    for layout, views, size in (("row", 2, (64, 128)), ("row", 3, (32, 96)), ("head_over_wrists", 3, (384, 320))):
        painted = torch.zeros(size, dtype=torch.int64)
        for slot in slots(layout, views, *size):
            painted[slot.top : slot.top + slot.height, slot.left : slot.left + slot.width] += 1
        assert (painted == 1).all()
    assert slots("head_over_wrists", 3, 384, 320)[0][2:] == (256, 320)
    for layout, views, size in (("row", 3, (64, 128)), ("head_over_wrists", 2, (384, 320))):
        with pytest.raises(UserError, match="cameras"):
            slots(layout, views, *size)


def test_cover_keeps_the_aspect_and_the_centre():
    wide = torch.arange(8.0).expand(1, 3, 4, 8)
    assert cover(wide, 4, 8) is wide
    assert torch.equal(cover(wide, 4, 4), wide[..., 2:6])
    assert cover(wide, 6, 6).shape[-2:] == (6, 6)
    # 240 x 320 to a square of 224: 298 columns, 37 cut off at each side.
    columns = torch.linspace(0, 1, 320).expand(1, 1, 240, 320)
    assert cover(columns, 224, 224)[0, 0, 0, 0].item() == pytest.approx(37.5 / 298 - 0.5 / 320, abs=2e-3)


def test_frames_become_one_video():
    images = torch.randint(0, 256, (2, 2, 3, 8, 8, 3), dtype=torch.uint8)
    video = compose(images, "row", 8, 16)
    assert video.shape == (2, 3, 3, 8, 16) and video.dtype == torch.float32
    expected = images[1, 1, 2].permute(2, 0, 1).float() / 127.5 - 1
    torch.testing.assert_close(video[1, :, 2, :, 8:], expected)
    assert video.min() >= -1 and video.max() <= 1 and math.isclose(compose(images * 0, "row", 8, 16).max(), -1)
