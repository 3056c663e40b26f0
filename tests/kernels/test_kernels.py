"""All ops by one set of tests: what is tested is what their `KERNEL` says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vlaforge.bench import cli
from vlaforge.kernels import check, static
from vlaforge.kernels.spec import INTERPRET, KernelError, available, choices, dispatch, use

OPS = available()
CASES = [pytest.param(op, case.name, id=f"{op}-{case.name}") for op, spec in OPS.items() for case in spec.cases]
ODD = [
    pytest.param(op, case.name, id=f"{op}-{case.name}")
    for op, spec in OPS.items()
    for case in spec.cases
    if case.name.startswith("odd")
]
DTYPES = [torch.float32, torch.bfloat16]
not_interpreted = pytest.mark.skipif(INTERPRET, reason="kernels of an interpreting process cannot be compiled")


def test_every_op_has_real_and_odd_shapes() -> None:
    wanted = {
        *("rms_norm", "ada_norm", "gated_residual", "glu", "rotary", "qk_norm_rope"),
        *("flow_mix", "masked_mse", "linear_cross_entropy", "image_prep", "adamw", "square_sums"),
    }
    assert wanted <= set(OPS)
    for op, spec in OPS.items():
        names = [case.name for case in spec.cases]
        assert len(set(names)) == len(names) > 1, op
        assert any(name.startswith("odd") for name in names), op


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_values_and_gradients_in_the_interpreter(interpreted, op: str, case: str, dtype: torch.dtype) -> None:
    """Inputs as models have them, odd ones in three memory layouts; a second backward; inputs left as they were."""
    found = interpreted(check.compare_all, op, case, dtype)
    assert set(found) == set(check.layouts_of(case))
    faults = [f"{layout}: {d}" for layout, differences in found.items() for d in differences if not d.ok]
    assert not faults, "\n".join(faults)
    grads = [d for d in found["contiguous"] if d.name.startswith("grad")]
    assert len(grads) >= len(OPS[op].grads) - 1  # an optional input may be absent in a case


@pytest.mark.parametrize(("op", "case"), [case for case in ODD if len(OPS[case.values[0]].grads) > 1])
def test_frozen_weights_get_no_gradient(interpreted, op: str, case: str) -> None:
    found = interpreted(check.compare_frozen, op, case)
    assert all(d.ok for d in found), found
    assert [d.name for d in found if d.name.startswith("grad")] == [f"grad {OPS[op].grads[0]}"]


@pytest.mark.parametrize(("op", "case"), ODD)
def test_registration(interpreted, op: str, case: str) -> None:
    """Declared mutations, fake shapes and strides, autograd and symbolic tracing of the registered ops."""
    names = interpreted(check.opcheck, op, case)
    assert names and all(name.startswith("vlaforge::") for name in names)
    # the conjugate of `rotary` is itself, and `linear_cross_entropy` makes its gradients in the forward
    if OPS[op].grads and op not in ("rotary", "linear_cross_entropy"):
        assert any(name.endswith("_backward") for name in names)


@pytest.mark.parametrize("op", OPS)
def test_one_graph_with_the_kernel(interpreted, op: str) -> None:
    assert interpreted(check.traced, op, OPS[op].cases[-1].name) < 1e-6


@pytest.mark.parametrize("op", OPS)
def test_one_graph_with_the_reference(op: str) -> None:
    assert check.traced(op, OPS[op].cases[-1].name) < 1e-6


@pytest.mark.parametrize("op", ["rms_norm", "glu"])
def test_generated_code_of_the_reference(op: str) -> None:
    """What a CPU user gets from `torch.compile`."""
    assert check.traced(op, OPS[op].cases[-1].name, backend="inductor") < 1e-5


@not_interpreted
@pytest.mark.parametrize("op", OPS)
def test_machine_code_for_three_generations(op: str) -> None:
    """One configuration of each kernel; `forge-bench kernels --static` does all."""
    made = list(static.builds(OPS[op], one_case=True))
    assert {build.architecture for build in made} == {80, 90, 100}
    faults = [f"{b.kernel} sm_{b.architecture} {b.config}: {fault}" for b in made for fault in b.faults]
    assert not faults, "\n".join(faults)
    assert all(0 < build.registers <= 255 for build in made)


@not_interpreted
def test_spills_are_seen() -> None:
    """A kernel with too few registers to work in is a fault, so the check above can fail."""
    spec = OPS["ada_norm"]
    launch = static.record(spec, spec.cases[0], torch.float32)[-1]
    starved = replace(launch, options={**launch.options, "maxnreg": 24})
    assert static.build(spec, spec.cases[0], torch.float32, starved, 90).faults


@not_interpreted
def test_the_table_of_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["kernels", "--static", "--op", "square_sums", "--arch", "90", "--jobs", "1", "--output", str(tmp_path)]
    assert cli.main(line) == 0
    record = json.loads(next(tmp_path.iterdir()).read_text())
    assert {build["kernel"] for build in record["builds"]} == {"squares_kernel", "gather_kernel"}
    assert record["versions"]["triton"] and not any(build["faults"] for build in record["builds"])
    monkeypatch.setitem(static.ARCHITECTURES, 90, ("a chip with little shared memory", 8))
    assert cli.main(line) == 1
    assert "fault: square_sums squares_kernel sm_90" in capsys.readouterr().out


def test_what_cannot_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "--static", "--op", "rmsnorm"]) == 2
    assert "did you mean 'rms_norm'" in capsys.readouterr().err
    if not torch.cuda.is_available() and not INTERPRET:
        assert cli.main(["kernels"]) == 2
        assert "forge-bench kernels --static" in capsys.readouterr().err


@not_interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_choice_is_explicit(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 8)
    key = ("rms_norm", "reference", "the tensors are on cpu, Triton needs cuda")
    before = choices().get(key, 0)
    OPS["rms_norm"].op(x)
    assert choices()[key] == before + 1
    asked = "rms_norm: the Triton kernel was asked for, but the tensors are on cpu"
    with pytest.raises(KernelError, match=asked), use("triton"):
        OPS["rms_norm"].op(x)
    with pytest.raises(KernelError, match="unknown executor"), use("cuda"):
        pass
    assert not caplog.records  # a CPU is no fault


def test_a_fallback_warns_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    decision = OPS["rms_norm"].supports(torch.empty(2, 8, dtype=torch.float64, device="meta"))
    assert not decision and "float64" in decision.reason
    for _ in range(2):
        assert dispatch("a test", torch.empty(1, device="meta"), decision) is False
    warned = f"a test runs its plain-torch reference: {decision.reason}"
    assert [record.message for record in caplog.records] == [warned]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_values_and_gradients_on_a_gpu(op: str, case: str, dtype: torch.dtype) -> None:
    """Real widths; batches small enough for any card."""
    spec = OPS[op]
    sized = next(c for c in spec.cases if c.name == case).capped({"B": 2, "N": 64, "layers": 1})
    faults = [
        f"{layout}: {d}"
        for layout in check.layouts_of(case)
        for d in check.compare(spec, sized, dtype, "cuda", layout)
        if not d.ok
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_one_graph_on_a_gpu(op: str) -> None:
    assert check.traced(op, OPS[op].cases[-1].name, backend="inductor", device="cuda") < 1e-5
