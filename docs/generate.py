"""Writes docs/flags.md, and the table of π0.5 in docs/distributed.md, from the code: python docs/generate.py"""

from pathlib import Path

from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.flags import markdown

HEAD = """# Flags of `forge-run`

Made from `runtime/args.py` by `make docs`; a test holds it to the code. Names and defaults are those of the public
LoongForge-Embodied manual where it has the flag. Each flag is also a field of the YAML section `train:`, under its
name with underscores.
"""
TABLE = "### π0.5"
BATCH, WORLDS = 16, (8, 32, 64, 256)


def scale_rows() -> str:
    """The rows of π0.5 on H200s, counted on its graph."""
    import torch

    from vlaforge.graphs import scale
    from vlaforge.runtime.config import resolve
    from vlaforge.runtime.preflight import plan_options

    resolved = resolve(["--model", "pi05", "--device-kind", "h200", "--per-device-batch-size", str(BATCH)])
    options = plan_options(resolved.args, torch.device("cpu"))
    with torch.device("meta"):
        model = resolved.family.model(resolved.model_config)
    work = scale.workload(model, resolved.family.model.contract(resolved.model_config), options)
    return scale.markdown([(work, BATCH)], options.device_kind, WORLDS).split("\n\n", 1)[1]


def with_rows(page: str, rows: str) -> str:
    """`page` with `rows` under the heading of the table."""
    before, _, after = page.partition(TABLE)
    heading, _, rest = after.partition("\n")
    return f"{before}{TABLE}{heading}\n\n{rows}\n\n{rest[rest.index('### ') :]}"


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "flags.md").write_text(markdown(TrainingArgs, HEAD), encoding="utf-8")
    page = here / "distributed.md"
    page.write_text(with_rows(page.read_text(encoding="utf-8"), scale_rows()), encoding="utf-8")
