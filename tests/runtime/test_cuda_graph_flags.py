"""LoongForge's CUDA graph flags become passes of the plan, and options of DDP."""

import pytest
import torch

from vlaforge.data.errors import UserError
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.config import resolve
from vlaforge.runtime.cuda_graphs import ONE_BUCKET_MB, grad_sync, graph_options
from vlaforge.runtime.preflight import plan_options

BASE = ["--model", "pi05", "--preset", "tiny", "--device-kind", "h200"]
DDP = ["--distributed-strategy", "ddp"]


def args_of(*flags: str) -> TrainingArgs:
    return resolve([*BASE, *flags]).args


@pytest.mark.parametrize(
    "flags, on, off, buckets, warmup",
    [
        ([], (), (), 0, None),
        (["--cuda-graph-warmup-steps", "7"], (), (), 0, None),  # belongs to `local`, and is said to
        (["--cuda-graph-impl", "none"], (), ("graph_step", "graph_blocks"), 0, None),
        (["--cuda-graph-impl", "local"], ("graph_step",), (), 0, 3),
        (["--cuda-graph-impl", "local", "--with", "graph_step"], ("graph_step",), (), 0, 3),
        (
            ["--cuda-graph-impl", "local", "--cuda-graph-scope", "per_microbatch", "--cuda-graph-warmup-steps", "5"],
            ("graph_blocks",), ("graph_step",), 0, 5,
        ),
        (["--cuda-graph-impl", "local", "--cuda-graph-pad-length", "48"], ("graph_step",), (), 48, 3),
        (["--cuda-graph-impl", "local", "--cuda-graph-pad-length", "0", "--buckets", "9"], ("graph_step",), (), 9, 3),
        (["--cuda-graph-impl", "local", "--no-cuda-graph-ddp-sync-in-graph", *DDP], ("graph_blocks",),
         ("graph_step",), 0, 3),
        (
            ["--cuda-graph-impl", "local", "--cuda-graph-scope", "per_microbatch", "--cuda-graph-ddp-sync-in-graph",
             *DDP], ("graph_step",), (), 0, 3,
        ),
    ],
)  # fmt: skip
def test_passes(flags, on, off, buckets, warmup):
    options = plan_options(args_of(*flags), torch.device("cpu"))
    assert (options.with_, options.without, options.buckets, options.graph_warmup) == (on, off, buckets, warmup)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--cuda-graph-impl", "local", "--without", "graph_step"], "contradicts --without graph_step"),
        (["--cuda-graph-impl", "none", "--with", "graph_blocks"], "contradicts --with graph_blocks"),
        (["--cuda-graph-impl", "local", "--cuda-graph-pad-length", "48", "--buckets", "32"], "both round lengths up"),
    ],
)
def test_contradictions(flags, words):
    with pytest.raises(UserError, match=words):
        graph_options(args_of(*flags))


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--cuda-graph-grad-sync-impl", "flat"], (None, None)),
        (["--ddp-bucket-cap-mb", "13", "--ddp-comm-hook", "fp16_compress_hook"], (13, "fp16_compress_hook")),
        (["--cuda-graph-impl", "local"], (None, None)),
        (["--cuda-graph-impl", "local", "--cuda-graph-grad-sync-bucket-mb", "64.4"], (64, None)),
        (["--cuda-graph-impl", "local", "--cuda-graph-grad-sync-impl", "flat"], (ONE_BUCKET_MB, None)),
        (["--cuda-graph-impl", "local", "--cuda-graph-grad-sync-dtype", "bf16"], (None, "bf16_compress_hook")),
    ],
)
def test_gradients_under_ddp(flags, expected):
    assert grad_sync(args_of(*DDP, *flags)) == expected


def test_what_waits_for_another_flag_is_said():
    notes = resolve([*BASE, "--cuda-graph-pad-length", "32"]).notes
    assert any("--cuda-graph-pad-length" in note and "--cuda-graph-impl local" in note for note in notes)
