"""What stands beside exported GR00T weights: a run on those files sees and gives the very numbers of the first."""

import json
from dataclasses import replace

import numpy as np
import pytest

from vlaforge.data.prepare import prepare
from vlaforge.data.readers import open_dataset
from vlaforge.data.tokenizer import Tokenizer
from vlaforge.models import family
from vlaforge.runtime.config import resolve

PARTS = {"gripper": {"start": 3, "end": 4}, "hand": {"start": 0, "end": 3}}


@pytest.mark.parametrize("name", ["groot_n1_6", "groot_n1_7"])
@pytest.mark.parametrize("mode", ["q99", "mean_std"])
@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("angles", [False, True])
def test_files_carry_processing_and_statistics(name, mode, parted, angles, metaworld, tmp_path):
    if parted:
        (tmp_path / "meta").mkdir()
        (tmp_path / "meta" / "modality.json").write_text(json.dumps({"state": PARTS, "action": PARTS}))
    resolved, dataset = resolve(["--model", name, "--preset", "tiny"]), open_dataset(metaworld)
    info = replace(dataset.info, path=tmp_path)
    model = replace(resolved.model_config, action_dim=4, state_dim=4)
    kind = family(name)

    def build(data):
        data, given = kind.processing.official(model, data, info)
        prepared = prepare(dataset, data, model.action_horizon, given)
        tokenizer = Tokenizer(resolved.args.tokenizer_path, **kind.processing.tokenizer_options)
        return kind.processing(model, data, prepared.normalizers, tokenizer, info), prepared.statistics.values

    keys = ("gripper" if parted else "state",) if angles else ()
    data = replace(
        resolved.data_config, normalization_mode=mode, crop_fraction=0.9, embodiment_tag="new_embodiment",
        sin_cos_embedding_keys=keys, random_rotation_angle=3.0,
    )  # fmt: skip
    first, values = build(data)
    statistics = {key: {n: v.tolist() for n, v in entry.items()} for key, entry in values.items()}
    cameras = {n: {"height": info.cameras[n].height, "width": info.cameras[n].width} for n in first.cameras}
    facts = {"path": str(tmp_path), "cameras": cameras, "action_dim": 4, "state_dim": 4}
    files = kind.part("companions").companions("nvidia", model, data, facts, statistics)
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    other = replace(data, official_folder=str(tmp_path), normalization_mode="min_max", crop_fraction=None)
    second, _ = build(other)
    assert second.data.normalization_mode == mode and second.data.crop_fraction == 0.9
    assert second.data.sin_cos_embedding_keys == keys and second.data.random_rotation_angle == 3.0
    sample = dataset.get(40, first.needs())
    a, b = (one.sample(sample, np.random.default_rng(0), False) for one in (first, second))
    assert a.keys() == b.keys() and all(np.array_equal(a[field], b[field]) for field in a)
    x_HA = np.random.default_rng(1).uniform(-0.9, 0.9, (model.action_horizon, model.max_action_dim))
    np.testing.assert_array_equal(first.actions(x_HA, sample), second.actions(x_HA, sample))
    again = kind.part("companions").companions("nvidia", model, other, facts, statistics)
    assert again["processor_config.json"] == files["processor_config.json"]
    config = json.loads(files["config.json"])
    assert config["model_type"] == f"Gr00tN1d{name[-1]}" and config["action_horizon"] == model.action_horizon
    assert config["diffusion_model_cfg"]["num_layers"] == model.dit.layers


def test_official_statistics_go_out_as_they_came(tmp_path):
    """Also those of relative actions: the run was normalised by them, not by its dataset's."""
    given = {"use_relative_action": True, "modality_configs": {"libero_sim": {"action": {"modality_keys": ["arm"]}}}}
    statistics = {"relative_action": {"arm": {"min": [[-1.0]], "max": [[1.0]]}}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_kwargs": given}))
    (tmp_path / "statistics.json").write_text(json.dumps({"libero_sim": statistics, "another": {}}))
    resolved = resolve(["--model", "groot_n1_7", "--preset", "tiny"])
    data = replace(resolved.data_config, official_folder=str(tmp_path), embodiment_tag="libero_sim")
    facts = {"cameras": {}, "action_dim": 1, "state_dim": 1}
    make = family("groot_n1_7").part("companions").companions
    files = make("nvidia", resolved.model_config, data, facts, {"action": {"min": [7.0]}})
    assert json.loads(files["processor_config.json"])["processor_kwargs"] == given
    assert json.loads(files["statistics.json"]) == {"libero_sim": statistics}


def test_relative_actions_have_no_statistics_here():
    resolved = resolve(["--model", "groot_n1_7", "--preset", "tiny"])
    data = replace(resolved.data_config, action_mode="relative")
    facts = {"cameras": {}, "action_dim": 4, "state_dim": 4}
    make = family("groot_n1_7").part("companions").companions
    files = make("nvidia", resolved.model_config, data, facts, {"action": {}})
    assert set(files) == {"config.json", "embodiment_id.json"}


@pytest.mark.parametrize("name, changes, written", [
    ("groot_n1_7", {}, True),
    ("groot_n1_7", {"embodiment_tag": "4"}, True),
    ("groot_n1_7", {"sin_cos_embedding_keys": ("state",)}, False),
    ("groot_n1_7", {"normalization_mode": "mean_std"}, False),
    ("groot_n1_7", {"action_mode": "relative"}, False),
    ("groot_n1_7", "parted", False),
    ("groot_n1_7", "mixture", False),
    ("groot_n1_6", {}, False),
])  # fmt: skip
def test_lerobots_files_say_what_its_pipelines_can_do_or_nothing(name, changes, written, tmp_path):
    """LeRobot 0.6.1 has no N1.6, and reads parts in the dataset's order alone."""
    if changes == "parted":
        (tmp_path / "meta").mkdir()
        (tmp_path / "meta" / "modality.json").write_text(json.dumps({"state": PARTS, "action": PARTS}))
    resolved = resolve(["--model", name, "--preset", "tiny"])
    data = replace(resolved.data_config, **(changes if isinstance(changes, dict) else {}))
    facts = {"path": str(tmp_path), "cameras": {}, "action_dim": 4, "state_dim": 4}
    bounds = dict.fromkeys(("min", "max", "q01", "q99", "mean", "std"), [1.0] * 4)
    prefix = "robot/" if changes == "mixture" else ""
    statistics = {f"{prefix}action": bounds, f"{prefix}observation.state": bounds}
    files = family(name).part("companions").companions("lerobot", resolved.model_config, data, facts, statistics)
    assert bool(files) == written
    if written:
        steps = json.loads(files["policy_preprocessor.json"])["steps"]
        pack = next(step["config"] for step in steps if step["registry_name"] == "groot_n1_7_pack_inputs_v1")
        number = pack["embodiment_mapping"][pack["embodiment_tag"]]
        assert number == {"new_embodiment": 10, "4": 4}[data.embodiment_tag]
