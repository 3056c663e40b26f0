"""Text → fixed-length token ids, from any ``tokenizer.json`` (a file, or the folder that holds it); and who is told
when a text is too long."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer as RawTokenizer

from vlaforge.data.errors import UserError

BOS_NAMES = ("<bos>", "<s>", "[CLS]", "<|begin_of_text|>")
EOS_NAMES = ("<eos>", "</s>", "[SEP]", "<|end_of_text|>", "<|endoftext|>")
PAD_NAMES = ("<pad>", "[PAD]", "<|endoftext|>")


class Tokenizer:
    """Encodes prompts to ids and a mask; picklable, so that loader workers can hold it.

    Args:
        path: ``tokenizer.json`` or a folder with one. UserError when it is missing or unreadable.
        bos, eos: put one in front / behind: True finds it by its usual names, a string names the token,
            False adds none. Ignored with `special_tokens`.
        special_tokens: let the file's own post-processor add its tokens instead.
        pad_id: id in padded positions; None finds the padding token, or takes 0.
        pad_side, truncate_side: where padding goes, and where a text that is too long loses tokens.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        bos: bool | str = True,
        eos: bool | str = False,
        special_tokens: bool = False,
        pad_id: int | None = None,
        pad_side: Literal["left", "right"] = "right",
        truncate_side: Literal["left", "right"] = "right",
    ):
        self.path = _find(path)
        try:
            self._raw = RawTokenizer.from_file(str(self.path))
        except Exception as error:
            raise UserError(f"'{self.path}' is not a tokenizer.json that can be read: {error}.") from error
        self._raw.no_padding()
        self._raw.no_truncation()
        self.special_tokens = special_tokens
        self.bos_id = None if special_tokens else self._token(bos, BOS_NAMES, "beginning-of-text")
        self.eos_id = None if special_tokens else self._token(eos, EOS_NAMES, "end-of-text")
        self.pad_id = pad_id if pad_id is not None else self._first(PAD_NAMES, default=0)
        self.pad_side, self.truncate_side = pad_side, truncate_side

    @property
    def vocab_size(self) -> int:
        """Ids are below this (added tokens included)."""
        return max(self._raw.get_vocab(with_added_tokens=True).values()) + 1

    def token_id(self, token: str) -> int | None:
        return self._raw.token_to_id(token)

    def ids(self, text: str) -> list[int]:
        """All ids of `text`, without padding or truncation."""
        ids = self._raw.encode(text, add_special_tokens=self.special_tokens).ids
        front = [] if self.bos_id is None else [self.bos_id]
        back = [] if self.eos_id is None else [self.eos_id]
        return [*front, *ids, *back]

    def encode(self, text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [length], mask bool [length], True on real tokens); too long a text loses its end.

        UserError where `length` leaves no room for any of it.
        """
        ids = self.ids(text)
        if len(ids) > length:
            if length <= len(self.ids("")):
                raise UserError(
                    f"Prompts of {length} tokens have no room for a word: raise the model's token length "
                    "(model.max_token_len, model.text_tokens)."
                )
            ids = ids[:length] if self.truncate_side == "right" else ids[-length:]
        out, mask = np.full(length, self.pad_id, np.int64), np.zeros(length, bool)
        place = slice(0, len(ids)) if self.pad_side == "right" else slice(length - len(ids), length)
        out[place], mask[place] = ids, True
        return out, mask

    def decode(self, ids: Sequence[int]) -> str:
        return self._raw.decode([int(i) for i in ids], skip_special_tokens=False)

    def _token(self, wanted: bool | str, names: Sequence[str], what: str) -> int | None:
        if wanted is False:
            return None
        names = names if wanted is True else (wanted,)
        found = self._first(names)
        if found is None:
            raise UserError(f"The tokenizer '{self.path}' has no {what} token (looked for {', '.join(names)}).")
        return found

    def _first(self, names: Sequence[str], default: int | None = None) -> int | None:
        return next((i for i in map(self._raw.token_to_id, names) if i is not None), default)


class Room:
    """The tokens that a model leaves a prompt; says once that one has more, be it of tasks or of a sample.

    Args:
        length: the most tokens; `setting` is what raises it.
        lost: what prompts lose that are too long.
    """

    def __init__(self, length: int, setting: str, lost: str = "their end"):
        self.length, self.setting, self.lost, self.said = length, setting, lost, False

    def notes(self, lengths: Mapping[str, int]) -> list[str]:
        """A sentence about the tasks whose prompts, of so many tokens, are cut; none where all have room."""
        cut = {task: count for task, count in lengths.items() if count > self.length}
        if not cut:
            return []
        self.said, longest = True, max(cut, key=lambda task: cut[task])
        return [
            f"Prompts of more than {self.length} tokens lose {self.lost}: {len(cut)} of {len(lengths)} tasks have "
            f"such. Raise {self.setting} to {cut[longest]}, which the longest needs: {longest!r}."
        ]

    def tell(self, count: int, text: str) -> None:
        """Warns, the first time, when the prompt `text` of `count` tokens is cut."""
        if count > self.length and not self.said:
            self.said = True
            warnings.warn(
                f"A prompt has {count} tokens; those of more than {self.length} lose {self.lost}: raise {self.setting}."
                f" Prompt: {text!r}",
                stacklevel=3,
            )


def _find(path: Path | str) -> Path:
    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    if file.is_file():
        return file
    what = "folder has no tokenizer.json" if given.is_dir() else "no such file or folder"
    raise UserError(
        f"Tokenizer '{given}' is missing: {what}. Give a tokenizer.json, or its folder, with --tokenizer-path."
    )
