"""A tokenizer whose tokens are the characters of the training text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tekso.framework.input import assets
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import REPLACEMENT, Tokenizer
from tekso.framework.params import param

_UNKNOWN = 1
_FIRST = 2
_CODE_POINTS = 0x110000


class Characters(Tokenizer):
    """One id per character of the training text, in the order of code points.

    Id 0 is the end of a text. Id 1 is any other character, which is decoded as U+FFFD and counts as
    one byte.
    """

    class Params(Tokenizer.Params):
        """Params of Characters."""

        vocab_size: int | None = param(
            "Number of ids, two of them special; None: as many as the training text needs.",
            default=None,
        )

    is_fast = True
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
          InputError: the text has more characters than vocab_size, or the table was made from
            different text.
        """
        super().__init__(params)
        table = assets.obtain(
            "characters.txt", assets_dir=assets_dir, settings={}, training=training, make=_table
        )
        characters = table.decode("utf-8")
        needed = len(characters) + _FIRST
        size = self.params.vocab_size or needed
        if size < needed:
            raise InputError(
                f"{self.params.path_of('vocab_size')} is {size}, but the training text has "
                f"{len(characters)} characters, which need {needed} ids including end of text and "
                "unknown character"
            )
        spare = [REPLACEMENT] * (size - needed)
        self.token_bytes = [part.encode() for part in ["", REPLACEMENT, *characters, *spare]]
        self._unused = (_UNKNOWN, *range(needed, size))
        self._id_of = np.full(_CODE_POINTS, _UNKNOWN, self.dtype)
        self._id_of[[ord(character) for character in characters]] = np.arange(_FIRST, needed)

    @property
    def token_num_bytes(self) -> np.ndarray:
        """Number of bytes of text per id: [vocab_size] int32."""
        num_bytes = super().token_num_bytes
        num_bytes[_UNKNOWN] = 1
        return num_bytes

    @property
    def unused_ids(self) -> Sequence[int]:
        """The id of unknown characters, and ids beyond the table."""
        return self._unused

    def unknown(self, text: str) -> list[str]:
        """Returns the characters that are not in the training text."""
        return [char for char in dict.fromkeys(text) if self._id_of[ord(char)] == _UNKNOWN]

    def _encode(self, text: str) -> np.ndarray:
        found: np.ndarray = self._id_of[np.frombuffer(text.encode("utf-32-le"), "<u4")]
        return found


def _table(texts: Iterable[str]) -> bytes:
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return "".join(sorted(found)).encode("utf-8")
