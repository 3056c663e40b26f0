"""Configuration files that are empty, no mapping, or wrong inside: the file and the place are named."""

from __future__ import annotations

import pytest

FILES = {
    "a list": ("- 1\n- 2\n", "must hold the sections model, data and train"),
    "a word": ("hello\n", "Unknown section in run.yaml 'hello': known are data, model, train."),
    "unknown section": ("modle: {x: 1}\n", "did you mean 'model'"),
    "section of text": ("model: big\n", "Section 'model' of run.yaml must hold settings"),
    "section as list": ("train: [1, 2]\n", "Section 'train' of run.yaml must hold settings"),
    "unknown setting": ("model: {vision: {depht: 1}}\n", "did you mean 'model.vision.depth'?"),
    "unknown flag": ("train: {train_itres: 1}\n", "did you mean 'train.train_iters'?"),
    "flag as it is typed": ("train: {train-iters: 1}\n", "did you mean 'train.train_iters'?"),
    "wrong type": ("train: {train_iters: many}\n", "train.train_iters in run.yaml is 'many': it must be an integer"),
    "wrong number": ("train: {save_interval: -1}\n", "--save-interval is -1: it must be at least 0."),
    "impossible size": ("model: {vision: {width: 0}}\n", "model.vision.width is 0: it must be at least 1."),
    "twice": ("train: {seed: 1}\nmodel: {}\ntrain: {seed: 2}\n", "at line 3: found duplicate key train."),
    "twice inside": ("train:\n  lr_base: 1.0e-3\n  lr_base: 1.0e-4\n", "at line 3: found duplicate key lr_base."),
    "tabs": ("model:\n\tvision: {width: 8}\n", "is not valid YAML at line 2"),
    "unclosed": ("model: {vision: {width: 8}\n", "is not valid YAML at line"),
    "nothing there": ("model: {image_size: '${model.nothing}'}\n", "refers to something that is not there"),
    "itself": ("model: {image_size: '${model.image_size}'}\n", "refers to something that is not there"),
    "python": ("model: !!python/object/apply:os.system ['true']\n", "is not valid YAML at line 1"),
    "number as name": ("1: {x: 1}\n", "Unknown section in run.yaml '1'"),
}


@pytest.mark.parametrize("case", FILES)
def test_config_files(refused, tmp_path, case):
    text, words = FILES[case]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert words in refused("--config-file", str(path))


def test_files_that_cannot_be_read(refused, tmp_path):
    assert "No such file" in refused("--config-file", str(tmp_path / "no.yaml"))
    assert "Is a directory" in refused("--config-file", str(tmp_path))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert "is not valid YAML" in refused("--config-file", str(tmp_path / "bytes.yaml"))
    (tmp_path / "mixture.yaml").write_text("datasets: 3\n")
    assert "mixture.yaml" in refused("--dataset-path", str(tmp_path / "mixture.yaml"))


def test_an_empty_file_changes_nothing(noted, tmp_path):
    path = tmp_path / "empty.yaml"
    for text in ("", "\n# nothing\n", "model:\n", "---\n"):
        path.write_text(text)
        assert "All checks passed" in noted("--config-file", str(path))
