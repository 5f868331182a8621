"""Several target languages in one model: joint corpora, and temperature-based sampling.

An epoch uses every pair of the largest language once. The pairs of smaller languages are repeated
so that a language of n pairs occurs in proportion to n ** (1 / temperature). No pair is dropped.

Source: Arivazhagan et al. 2019, "Massively multilingual neural machine translation in the wild",
section 4.2 (temperature based sampling).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.skips import BadRecordError, Origin, SkipReport
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.framework.params import REQUIRED, param
from tekso.tasks.mt.pairs import Pair, PairSource

Indices = npt.NDArray[np.int64]


class ManyLanguages(PairSource):
    """Concatenates corpora of several target languages."""

    class Params(PairSource.Params):
        """Params of ManyLanguages."""

        corpora: dict[str, PairSource.Params] = param(
            "{target language: its corpus}, in the order of the language tokens.", default=REQUIRED
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Opens all corpora.

        Raises:
          InputError: there is no corpus, or a corpus has several languages or no pairs.
        """
        super().__init__(params, split=split)
        p = self.params
        if not p.corpora:
            raise InputError(
                f"{p.path_of('corpora')} is empty: give one corpus for each target language"
            )
        self.languages = self.languages_of(p)
        self._corpora: list[PairSource] = [
            corpus.instantiate(split=split) for corpus in p.corpora.values()
        ]
        for language, corpus in zip(self.languages, self._corpora, strict=True):
            if corpus.languages:
                raise InputError(
                    f"{p.path_of('corpora')}.{language} has {len(corpus.languages)} languages, "
                    "must have one"
                )
        self._index = JoinedIndex(len(corpus) for corpus in self._corpora)

    @classmethod
    def languages_of(cls, params: Any) -> tuple[str, ...]:
        """See PairSource."""
        return tuple(params.corpora)

    def __len__(self) -> int:
        return len(self._index)

    def origin(self, index: int) -> Origin:
        """Returns the location of a record."""
        number, within = self._index.place(index)
        return self._corpora[number].origin(within)

    def fingerprint(self) -> str:
        """Returns a digest of all records."""
        parts = zip(self.languages, self._corpora, strict=True)
        return digest(f"{name} {corpus.fingerprint()}".encode() for name, corpus in parts)

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"corpora of {len(self.params.corpora)} languages"

    def skipped(self) -> SkipReport:
        """Returns a report of the records skipped so far."""
        return sum((corpus.skipped() for corpus in self._corpora), super().skipped())

    def _read(self, index: int) -> Pair:
        number, within = self._index.place(index)
        pair: Pair = self._corpora[number][within]
        return pair._replace(language=self.languages[number])

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        for language, corpus in zip(self.languages, self._corpora, strict=True):
            for origin, record in corpus._read_all():
                is_bad = isinstance(record, BadRecordError)
                yield origin, record if is_bad else record._replace(language=language)


def sampled(
    languages: npt.NDArray[np.integer[Any]], *, temperature: float, key: shuffle.Words
) -> Indices:
    """Returns the pairs of an epoch, ordered by language; pairs of rare languages are repeated.

    Args:
      languages: number of the language of each pair.
      temperature: at least 1; with 1, every pair occurs once.
      key: random key that selects which pairs are repeated once more than others.

    Shapes:
      languages: [pairs]
      key: [1]
      returns: [pairs in the epoch]
    """
    members = [np.flatnonzero(languages == number) for number in np.unique(languages)]
    most = max(len(one) for one in members)
    taken = []
    for number, one in enumerate(members):
        count = round(most * (len(one) / most) ** (1.0 / temperature))
        repetition, index = np.divmod(np.arange(max(count, len(one))), len(one))
        own = shuffle.fold(shuffle.fold(key, number), repetition)
        taken.append(one[shuffle.permute(index, len(one), own)])
    return np.concatenate(taken)
