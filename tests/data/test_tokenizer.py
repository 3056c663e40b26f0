"""Prompts to ids, from a tokenizer.json made here."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import models, pre_tokenizers, processors

from vlaforge.data.errors import UserError
from vlaforge.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "open", "the", "drawer", "now"]
    raw = Raw(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.add_special_tokens(words[:4])
    raw.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    raw.enable_padding(length=50)
    made = tmp_path_factory.mktemp("tokenizer")
    raw.save(str(made / "tokenizer.json"))
    return made


def test_pads_and_masks(folder):
    ids, mask = Tokenizer(folder).encode("open the drawer", 6)
    assert ids.tolist() == [2, 4, 5, 6, 0, 0] and mask.tolist() == [True] * 4 + [False] * 2
    ids, mask = Tokenizer(folder / "tokenizer.json", bos=False, eos=True, pad_side="left").encode("open the", 5)
    assert ids.tolist() == [0, 0, 4, 5, 1] and mask.tolist() == [False, False, True, True, True]


def test_truncates_where_it_is_told(folder):
    assert Tokenizer(folder).encode("open the drawer now", 3)[0].tolist() == [2, 4, 5]
    ids, mask = Tokenizer(folder, truncate_side="left").encode("open the drawer now", 3)
    assert ids.tolist() == [5, 6, 7] and mask.all()


def test_the_files_own_special_tokens(folder):
    assert Tokenizer(folder, special_tokens=True).ids("open") == [2, 4, 1]
    assert Tokenizer(folder, bos="<eos>", pad_id=7).encode("open", 3)[0].tolist() == [1, 4, 7]


def test_goes_to_workers(folder):
    there = pickle.loads(pickle.dumps(Tokenizer(folder)))
    assert there.encode("open", 3)[0].tolist() == [2, 4, 0]
    assert there.vocab_size == 8 and there.token_id("drawer") == 6 and there.decode([4, 5]) == "open the"


def test_faults_are_said(folder, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        Tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="can be read"):
        Tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"no beginning-of-text token \(looked for <s>\)"):
        Tokenizer(folder, bos="<s>")
