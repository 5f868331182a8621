"""A tokenizer whose tokens are phonemes, by a lexicon file of pronunciations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import REQUIRED, param

_UNKNOWN, _BOUNDARY, _FIRST = 1, 2, 3
_COMMENT = ";;;"


class Lexicon(Tokenizer):
    """One id per phoneme of the lexicon, in alphabetical order.

    Id 0 is the end of a text, id 1 a word that is not in the lexicon, id 2 the boundary between two
    words. Ids are decoded as words: as the first word in the file with these phonemes, or, if there
    is none, as the phonemes, joined by "-". So error rates are of words.
    """

    class Params(Tokenizer.Params):
        """Params of Lexicon."""

        file: str = param(
            "Lines with a word and its phonemes, separated by white space, as in CMUdict. Of "
            "several pronunciations (WORD(2)), the first is learned. Words are in lower case.",
            default=REQUIRED,
        )

    is_fast = True
    keeps_lines_apart = False
    end_id = 0

    def __init__(
        self,
        params: Any,
        *,
        assets_dir: str | None = None,
        training: TrainingText | None = None,
    ) -> None:
        """Reads the file.

        Raises:
          InputError: it has no pronunciations, or a line has no phonemes.
        """
        super().__init__(params, assets_dir=assets_dir, training=training)
        path = files.glob([self.params.file], what=self.params.path_of("file"))[0]
        phonemes_of: dict[str, list[str]] = {}
        words_of: dict[tuple[str, ...], str] = {}
        for number, line in enumerate(files.read(path).decode("utf-8", "replace").splitlines(), 1):
            if not line.strip() or line.startswith(_COMMENT):
                continue
            word, *phonemes = line.split()
            if not phonemes:
                raise InputError(f"{path}, line {number}: {word!r} has no phonemes")
            word = word.partition("(")[0].lower()
            phonemes_of.setdefault(word, phonemes)
            words_of.setdefault(tuple(phonemes), word)
        if not phonemes_of:
            raise InputError(f"{path} has no pronunciations: expected lines such as 'one W AH N'")
        known = sorted({phoneme for own in words_of for phoneme in own})
        id_of = {phoneme: i for i, phoneme in enumerate(known, _FIRST)}
        self.token_bytes = [b"", b"<UNK> ", b"| ", *(f"{one} ".encode() for one in known)]
        self._phonemes = known
        self._ids_of = {
            word: [id_of[phoneme] for phoneme in own] for word, own in phonemes_of.items()
        }
        self._words_of = {
            tuple(id_of[phoneme] for phoneme in own): word for own, word in words_of.items()
        }

    @property
    def unused_ids(self) -> Sequence[int]:
        """The id of unknown words."""
        return (_UNKNOWN,)

    def unknown(self, text: str) -> list[str]:
        """Returns the words that are not in the lexicon."""
        return [word for word in dict.fromkeys(text.lower().split()) if word not in self._ids_of]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the words of some phonemes; see the class."""
        return " ".join(word for word, _ in self.words(ids))

    def words(self, ids: Iterable[int]) -> list[tuple[str, int]]:
        """Returns each word of some ids, and the index of its first phoneme."""
        return [(self._word(own), begin) for own, begin in _divided(ids)]

    def _word(self, ids: tuple[int, ...]) -> str:
        if ids in self._words_of:
            return self._words_of[ids]
        known = range(_FIRST, _FIRST + len(self._phonemes))
        names = (self._phonemes[i - _FIRST] if i in known else "<UNK>" for i in ids)
        return "-".join(names)

    def _encode(self, text: str) -> np.ndarray:
        found: list[int] = []
        for word in text.lower().split():
            found += [_BOUNDARY] if found else []
            found += self._ids_of.get(word, [_UNKNOWN])
        return np.array(found, self.dtype)


def _divided(ids: Iterable[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields the ids of each word, and the index of its first one."""
    own: list[int] = []
    for i, token in enumerate([*map(int, ids), _BOUNDARY]):
        if token != _BOUNDARY:
            own.append(token)
        elif own:
            yield tuple(own), i - len(own)
            own = []
