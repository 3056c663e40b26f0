"""Official statistics in a mixture: each dataset has those of its own embodiment, or a sentence says why not."""

import json

import numpy as np
import pytest

from vlaforge.data.errors import UserError
from vlaforge.runtime.config import resolve
from vlaforge.runtime.setup import build_setup

NAMES = ("libero_sim", "aloha")
COLUMNS = ("state", "action")


def statistics(low):
    """Of a state and an action of four dimensions in one part each: quantiles from `low` to `low` + 4."""
    values = {"min": low - 1, "max": low + 5, "q01": low, "q99": low + 4, "mean": low + 2, "std": 2.0}
    return {kind: {"whole": {name: [value] * 4 for name, value in values.items()}} for kind in COLUMNS}


def configs(steps=8, **state):
    return {
        "state": {"modality_keys": ["whole"], **state},
        "action": {"modality_keys": ["whole"], "delta_indices": list(range(steps))},
    }


class Folder:
    """An official checkpoint's files for both names, and runs on a mixture of the bundled demonstrations."""

    def __init__(self, folder, dataset):
        self.folder, self.dataset = folder, dataset
        self.statistics = {name: statistics(low) for name, low in zip(NAMES, (-2.0, -1.0))}
        self.modalities = {name: configs() for name in NAMES}

    def setup(self, *flags, names=NAMES):
        settings = {"use_percentiles": True, "modality_configs": self.modalities}
        files = {
            "statistics.json": self.statistics,
            "embodiment_id.json": dict(zip(NAMES, (2, 5))),
            "processor_config.json": {"processor_kwargs": settings},
        }
        for name, content in files.items():
            (self.folder / name).write_text(json.dumps(content))
        entries = [
            {"path": str(self.dataset), "embodiment": name, "episodes": f"{2 * i}:{2 * i + 2}"}
            for i, name in enumerate(names)
        ]
        (self.folder / "mixture.yaml").write_text(json.dumps({"datasets": entries}))
        argv = ["--model", "groot_n1_7", "--preset", "tiny", "--device", "cpu", "--allow-extreme-norm"]
        argv += ["--dataset-path", str(self.folder / "mixture.yaml"), "--eval-episodes", "none"]
        return build_setup(resolve([*argv, f"data.official_folder={self.folder}", "data.embodiment_tag=7", *flags]))


@pytest.fixture
def official(tmp_path, metaworld, monkeypatch):
    monkeypatch.setenv("VLAFORGE_CACHE", str(tmp_path / "cache"))
    return Folder(tmp_path, metaworld)


def samples(setup):
    """The first sample of each dataset, as it was read and as the model sees it."""
    starts = (0, len(setup.dataset.parts[0].dataset))
    read = [setup.dataset.get(position, setup.processing.needs()) for position in starts]
    return [(one, setup.processing.sample(one, np.random.default_rng(0), False)) for one in read]


def test_each_dataset_has_the_statistics_of_its_embodiment(official):
    setup = official.setup()
    assert setup.data_config.action_steps == 8
    for (read, seen), low, number in zip(samples(setup), (-2.0, -1.0), (2, 5)):
        state = np.reshape(read["observation.state"], -1)
        np.testing.assert_allclose(seen["state"][:4], np.clip(2 * (state - low) / 4 - 1, -1, 1), atol=1e-6)
        assert seen["embodiment"] == number and not seen["action_mask"][8:].any()
        inside = seen["action_mask"][:, 0]
        back = setup.processing.actions(seen["actions"], read)
        np.testing.assert_allclose(back[inside], read["action"][inside], atol=1e-5)
    assert set(setup.normalizers.entries) == set(NAMES)


def test_a_dataset_without_official_statistics_has_its_own(official):
    plain = official.setup("data.official_statistics=false")
    del official.statistics["aloha"]
    setup = official.setup("data.normalization_mode=q99")
    kept, own = ([fields["state"] for _, fields in samples(one)] for one in (plain, setup))
    assert np.array_equal(kept[1], own[1]) and not np.array_equal(kept[0], own[0])


def test_a_dataset_that_is_no_embodiment_of_the_checkpoint_is_refused(official):
    sentence = "'mine' is no embodiment of .* statistics of 'libero_sim' .* 'embodiment' in the mixture's file"
    with pytest.raises(UserError, match=sentence):
        official.setup("data.embodiment_tag=libero_sim", names=("aloha", "mine"))
    official.setup("data.embodiment_tag=libero_sim", "data.official_statistics=false", names=("aloha", "mine"))
    # The checkpoint has no statistics of the weights that it trains now: it is a robot of its own.
    setup = official.setup("data.action_steps=8", names=("aloha", "mine"))
    assert samples(setup)[1][1]["embodiment"] == 7


def test_datasets_that_need_different_settings_are_refused(official):
    official.modalities["aloha"] = configs(steps=4)
    with pytest.raises(UserError, match=r"data\.action_steps is 8 for .* 'libero_sim' and 4 for 'aloha'"):
        official.setup()
    setup = official.setup("data.action_steps=4")
    assert setup.data_config.action_steps == 4


def test_what_a_mixture_cannot_show_is_refused(official):
    official.modalities["aloha"] = configs(mean_std_embedding_keys=["whole"])
    with pytest.raises(UserError, match="the state of the mixture's dataset 'aloha' in another order or form"):
        official.setup()
