"""Attention masks of world-action models from token labels, run as a few calls without a mask.

A sequence of a world-action model is made of *segments*: tokens that no rule tells apart (one latent frame, one block
of actions). A rule says which segment may look at which; from it follow

* the structured plan: queries that see the same keys form one call of plain attention over exactly those keys. Nothing
  that is masked is computed, no [S, S] mask is read, and the fast kernels apply;
* the dense bool mask, for tests and for comparison with the official implementations.

FastWAM's masks become 3 calls, and are exact: a softmax over the allowed keys is the masked softmax. LingBot-VA's and
DreamZero's masks are rules over the same labels (sample, chunk, role, modality).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one stream that every rule treats alike.

    Args:
        length: how many tokens.
        modality: ``video``, ``action``, ``state``; each modality is its own stream (tensor) of the attention.
        chunk: number of the frame, or of the block of frames or actions.
        role: ``noisy`` (is denoised) or ``clean`` (a condition).
        sample: which sample of a packed sequence.
    """

    length: int
    modality: str = "video"
    chunk: int = 0
    role: str = "noisy"
    sample: int = 0


Rule = Callable[[Segment, Segment], bool]
"""rule(query, key): may tokens of the first look at tokens of the second."""


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of one stream."""

    stream: str
    start: int
    stop: int


@dataclass(frozen=True)
class Call:
    """One plain attention: the queries of `queries` over the keys and values of `keys`."""

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]


Plan = tuple[Call, ...]


def plan(segments: Sequence[Segment], rule: Rule, wanted: Callable[[Segment], bool] = lambda _: True) -> Plan:
    """The calls that compute masked attention exactly, for the queries that are `wanted`.

    The query streams of `attend` hold the wanted segments alone, in their order; keys and values hold all. ValueError
    when a wanted segment may look at nothing.
    """
    spans = _spans(segments)
    asked = [number for number, segment in enumerate(segments) if wanted(segment)]
    places = dict(zip(asked, _spans([segments[number] for number in asked])))
    groups: dict[tuple[int, ...], list[int]] = {}
    for number in asked:
        seen = tuple(n for n, key in enumerate(segments) if rule(segments[number], key))
        if not seen:
            raise ValueError(f"the rule lets segment {number} ({segments[number]}) look at nothing")
        groups.setdefault(seen, []).append(number)
    return tuple(
        Call(_joined([places[n] for n in queries]), _joined([spans[n] for n in keys]))
        for keys, queries in groups.items()
    )


def dense(segments: Sequence[Segment], rule: Rule) -> Tensor:
    """Bool [S, S] on the CPU, True where query row may look at key column; segments in the given order."""
    small = torch.tensor([[rule(query, key) for key in segments] for query in segments], dtype=torch.bool)
    lengths = torch.tensor([segment.length for segment in segments])
    return small.repeat_interleave(lengths, 0).repeat_interleave(lengths, 1)


def attend(
    calls: Plan,
    queries: dict[str, Tensor],
    keys: dict[str, Tensor],
    values: dict[str, Tensor],
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Runs a plan. Streams are [B, S, H, K] by modality; so are the results, in the order of the queries.

    `attention(q, k, v)` is plain attention without a mask, [B, S, H, K] in and out.
    """
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for call in calls:
        mixed = attention(_gather(queries, call.queries), _gather(keys, call.keys), _gather(values, call.keys))
        lengths = [span.stop - span.start for span in call.queries]
        for span, piece in zip(call.queries, mixed.split(lengths, dim=1) if len(lengths) > 1 else (mixed,)):
            parts.setdefault(span.stream, []).append((span.start, piece))
    out = {}
    for stream, pieces in parts.items():
        ordered = [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
        out[stream] = torch.cat(ordered, dim=1) if len(ordered) > 1 else ordered[0]
    return out


def _gather(streams: dict[str, Tensor], spans: tuple[Span, ...]) -> Tensor:
    pieces = [streams[span.stream][:, span.start : span.stop] for span in spans]
    return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]


def _spans(segments: Sequence[Segment]) -> list[Span]:
    """Each segment's place in its own stream."""
    ends: dict[str, int] = {}
    spans = []
    for segment in segments:
        start = ends.get(segment.modality, 0)
        ends[segment.modality] = start + segment.length
        spans.append(Span(segment.modality, start, start + segment.length))
    return spans


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Neighbouring spans of a stream as one, so that fewer pieces are copied."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].stream == span.stream and out[-1].stop == span.start:
            out[-1] = Span(span.stream, out[-1].start, span.stop)
        else:
            out.append(span)
    return tuple(out)


def frame_segments(frames: int, tokens: int, role: str = "noisy", sample: int = 0) -> list[Segment]:
    """One segment a latent frame."""
    return [Segment(tokens, "video", frame, role, sample) for frame in range(frames)]


def bidirectional(query: Segment, key: Segment) -> bool:
    """Everything of the same sample."""
    return query.sample == key.sample


def frame_causal(query: Segment, key: Segment) -> bool:
    """A frame sees itself and earlier frames."""
    return query.sample == key.sample and key.chunk <= query.chunk


def first_frame_causal(query: Segment, key: Segment) -> bool:
    """The first frame sees itself alone, the others see all: what is generated never reaches the given frame."""
    return query.sample == key.sample and (query.chunk > 0 or key.chunk == 0)


VIDEO_RULES: dict[str, Rule] = {
    "bidirectional": bidirectional,
    "per_frame_causal": frame_causal,
    "first_frame_causal": first_frame_causal,
}
"""Video-to-video masks by their official names."""
