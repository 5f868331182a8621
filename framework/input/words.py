"""A tokenizer whose tokens are the most frequent words, separated by white space."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input import assets
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import REQUIRED, param

_UNKNOWN = 1
_FIRST = 2
_MOST_COUNTED = 4_000_000  # different words; of more, the rarer half is forgotten while counting


class Words(Tokenizer):
    """One id per word. White space is decoded as single spaces, and perplexity is per word.

    Id 0 is the end of a text. Id 1 is any other word, which is decoded as "<UNK>" and counts as one
    byte. A word counts one byte more than its length, for the space after it.
    """

    class Params(Tokenizer.Params):
        """Params of Words."""

        vocab_size: int = param("Number of ids, two of them special.", default=REQUIRED)
        file: str = param(
            "Table file with one word per line, of which the first vocab_size - 2 are used; empty: "
            "the most frequent words of the training text.",
            default="",
        )

    keeps_lines_apart = True
    end_id = 0

    def __init__(
        self,
        params: Any,
        *,
        assets_dir: str | None = None,
        training: TrainingText | None = None,
    ) -> None:
        """Loads the table, or makes it from the training text.

        Raises:
          InputError: vocab_size is too small, or the table was made from different text.
        """
        super().__init__(params)
        p = self.params
        if p.vocab_size <= _FIRST:
            raise InputError(
                f"{p.path_of('vocab_size')} is {p.vocab_size}, but must be more than {_FIRST}"
            )
        if p.file:
            data = files.read(files.glob([p.file], what=p.path_of("file"))[0])
        else:
            data = assets.obtain(
                "words.txt",
                assets_dir=assets_dir,
                settings={"vocab_size": p.vocab_size},
                training=training,
                make=lambda texts: _table(texts, p.vocab_size - _FIRST),
            )
        words = data.decode("utf-8").split()[: p.vocab_size - _FIRST]
        spare = [b""] * (p.vocab_size - _FIRST - len(words))
        self.token_bytes = [b"", b"<UNK> ", *(f"{word} ".encode() for word in words), *spare]
        self._unused = range(_FIRST + len(words), p.vocab_size)
        self._id_of = {word: index for index, word in enumerate(words, _FIRST)}

    @property
    def token_num_bytes(self) -> np.ndarray:
        """Number of bytes of text per id: [vocab_size] int32."""
        num_bytes = super().token_num_bytes
        num_bytes[_UNKNOWN] = 1
        return num_bytes

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the words of some ids, separated by single spaces."""
        return super().decode(ids).removesuffix(" ")

    @property
    def unused_ids(self) -> Sequence[int]:
        """Ids beyond the table, without the id of unknown words: training text may contain it."""
        return self._unused

    def unknown(self, text: str) -> list[str]:
        """Returns the words that are not in the table."""
        return [word for word in dict.fromkeys(text.split()) if word not in self._id_of]

    def _encode(self, text: str) -> np.ndarray:
        find = self._id_of.get
        return np.array([find(word, _UNKNOWN) for word in text.split()], np.int32)


def _table(texts: Iterable[str], count: int) -> bytes:
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(text.split())
        if len(counts) > _MOST_COUNTED:
            frequent = sorted(counts, key=lambda word: (-counts[word], word))[: _MOST_COUNTED // 2]
            counts = collections.Counter({word: counts[word] for word in frequent})
    most = sorted(counts, key=lambda word: (-counts[word], word))[:count]
    return "\n".join(most).encode("utf-8")
