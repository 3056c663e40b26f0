"""``--export FORMAT``: a checkpoint's weights in another form, alone: ours (safetensors, pt, dcp) or an official
layout.

The averaged weights are taken where the run kept some, adapters are merged, and what was written is read back and
compared. Integers and bools keep their type whatever ``--export-dtype`` says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlaforge.data.errors import UserError, unknown
from vlaforge.data.schema import make_draw
from vlaforge.models import Family
from vlaforge.runtime.adapter import attach, is_adapter
from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.checkpoint import files, formats, tensors
from vlaforge.runtime.checkpoint.store import Checkpoints, reason
from vlaforge.runtime.checkpoint.tensors import TensorFiles, whole
from vlaforge.runtime.checkpoint.weights import find_weights, load_pretrained, model_tensors, open_weights
from vlaforge.runtime.config import Resolved
from vlaforge.runtime.lora import merge

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEPT = ("config.yaml", "normalizers.json", "statistics.json", "dataset.json", "tokenizer.json")
"""Files of a checkpoint that go along into our own formats."""
MERGE_TOLERANCE = 1e-4
"""Largest difference of merged and unmerged losses (relative), fp32."""


def source_of(args: TrainingArgs) -> Path:
    """The checkpoint to export: ``--pretrained-checkpoint``, or the newest of ``--output-dir``. UserError when none."""
    if args.pretrained_checkpoint is not None and not args.use_lora:
        return find_weights(args.pretrained_checkpoint)
    newest = Checkpoints(Path(args.output_dir) / "checkpoints").newest()
    if newest is None:
        raise UserError(f"There is no whole checkpoint in '{args.output_dir}' to export.")
    return newest[1]


def export(resolved: Resolved, note: Callable[[str], None]) -> Path:
    """Writes the export and returns its folder.

    Raises:
        UserError: unknown format, no checkpoint, the target is there already, or the weights do not fit the layout.
    """
    args, family = resolved.args, resolved.family
    layouts = family.part("convert").LAYOUTS
    name = args.export
    if name not in formats.FORMATS and name not in layouts:
        raise unknown("export format", str(name), [*formats.FORMATS, *layouts])
    source = source_of(args)
    target = Path(args.export_dir) if args.export_dir else Path(args.output_dir) / "export" / str(name)
    if target.exists():
        raise UserError(f"'{target}' is there already: remove it, or choose another folder with --export-dir.")
    state = _cast(weights_of(resolved, source, note), args.export_dtype)
    if name in layouts:
        state = layouts[name].save(state)
    try:
        path = _write(target, str(name), state, source, _companions(resolved, family, str(name), source))
    except OSError as error:
        raise UserError(f"The export could not be written: {reason(error, target)}.") from error
    _check(path, str(name), state)
    size = sum(value.numel() * value.element_size() for value in state.values())
    kinds = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
    note(f"Exported {source} as {name} to {path}: {len(state)} tensors, {size / 2**20:.1f} MiB, {', '.join(kinds)}")
    return path


def weights_of(resolved: Resolved, source: Path, note: Callable[[str], None]) -> dict[str, Tensor]:
    """The weights under our names, on the host: averaged if the run kept an average, adapters merged."""
    if is_adapter(source):
        return _merged(resolved, source, note)
    state = dict(open_weights(source))
    average = formats.read(source, "ema") if source.is_dir() and resolved.args.export_average else None
    if average is not None:
        note(f"The averaged weights are exported ({len(average)} of {len(state)} tensors were trained).")
        state |= dict(average)
    return state


def _merged(resolved: Resolved, source: Path, note: Callable[[str], None]) -> dict[str, Tensor]:
    args, family = resolved.args, resolved.family
    held = json.loads((source / "adapter_config.json").read_text())
    base = args.pretrained_checkpoint or held.get("base_model_name_or_path")
    config = _fitted(resolved, source)
    torch.manual_seed(args.seed)
    model = family.model(config)
    if base is not None:
        load_pretrained(model, family, base)
    attach(model, args, source, note)
    if args.export_average and (average := formats.read(source, "ema")) is not None:
        for name, value in average.items():
            model.get_parameter(name).data.copy_(value)
    before = _probe(family, model, config)
    merge(model)
    apart = abs(_probe(family, model, config) - before) / max(abs(before), 1e-12)
    if apart > MERGE_TOLERANCE:
        raise UserError(f"The merged model differs from the adapted one: loss by {apart:.1e} relative.")
    note(f"Adapters merged: the loss on a synthetic batch differs by {apart:.1e} (relative).")
    return model_tensors(model)


@torch.no_grad()
def _probe(family: Family, model: nn.Module, config: Any) -> float:
    contract = family.model.contract(config)
    batch = contract.synthetic(2, seed=0)
    draw = make_draw(contract.draws, [0, 1], seed=0, epoch=0)
    return float(model.eval()(batch, draw).total())


def _fitted(resolved: Resolved, source: Path) -> Any:
    """The model's configuration with the robot's dimensions, which the checkpoint knows."""
    from dataclasses import replace

    known = _json(source / "dataset.json")
    config = resolved.model_config
    missing = [n for n in ("action_dim", "state_dim") if n in known and getattr(config, n, 0) is None]
    return replace(config, **{name: known[name] for name in missing})


def _cast(state: Mapping[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    if dtype is None:
        return dict(state)
    return {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in state.items()}


def _companions(resolved: Resolved, family: Family, layout: str, source: Path) -> dict[str, Any]:
    """What stands beside the weights in an official layout, where the family knows it and the checkpoint says
    enough."""
    if layout in formats.FORMATS or not source.is_dir() or not (family.folder / "companions.py").is_file():
        return {}
    dataset, statistics = _json(source / "dataset.json"), _json(source / "statistics.json")
    if not dataset or not statistics:
        return {}
    make = family.part("companions").companions
    return make(layout, _fitted(resolved, source), resolved.data_config, dataset, statistics)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(target: Path, name: str, state: Mapping[str, Tensor], source: Path, beside: Mapping[str, Any]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = files.Draft(target.parent, target.name)
    try:
        if name in formats.FORMATS:
            formats.write(draft, name, {"model": state})
            for file in KEPT:
                if (source / file).is_file():
                    draft.copy(source / file, file)
        else:
            tensors.save(draft, "model", state, shard_bytes=1 << 62)
        for file, content in beside.items():
            if isinstance(content, str):
                draft.text(file, content)
            else:
                tensors.save(draft, file.removesuffix(".safetensors"), content)
        return draft.commit({"exported": name, "from": str(source)})
    finally:
        draft.discard()


def _check(path: Path, name: str, state: Mapping[str, Tensor]) -> None:
    """Every tensor read back is the one that was meant, dtype included."""
    back = formats.read(path, "model") if name in formats.FORMATS else TensorFiles(path)
    for key, value in state.items():
        if key not in back or back[key].dtype != value.dtype or not torch.equal(back[key], whole(value)):
            raise UserError(f"The export does not come back as it was written: {key} differs.")
