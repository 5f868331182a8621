"""Parallel sentences generated from CLDR data, without a download.

The source is English: "Thursday, May 7, 2026", "in 3 days", "€12.50", "12.5 kilometers", "Austria,
German, or Swiss francs". The target is its translation, with the word order, cases and plurals of
the target language. The package Babel writes both, so no file is read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from tekso.framework.input.errors import InputError
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.skips import Origin
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split, check_fractions, split_of
from tekso.framework.params import param
from tekso.tasks.mt import cldr_phrases
from tekso.tasks.mt.cldr_writer import Phrase, UnwritableError, Writer
from tekso.tasks.mt.pairs import Pair, PairSource

_CODES = """
af am ar as ast az be bg bn br bs ca chr cs cy da de dsb el es et eu fa fi fil fo fr fy ga gd gl
gu ha he hi hr hsb ht hu hy ia id ig is it ja jv ka kk km kn ko kok ku ky lb lo lt lv mi mk ml
mn mr ms my nb ne nl nn or pa pl ps pt rm ro ru sc sd si sk sl so sq sr sv sw ta te th ti tk tr
ug uk ur uz vi yo zh zu
"""
LOCALES = tuple(_CODES.split())
"""Languages in which CLDR can write nearly all phrases: at least 98 of 100."""

TextPair = tuple[str, str]

_MOST_DRAWN = 20  # gives up after drawing this many phrases per requested pair


class Cldr(PairSource):
    """Draws random pairs of English and other languages; all pairs are different.

    The split of a pair depends on its source alone, so no source is in two splits, not even with
    another language. In dev, no target is a training target of the same language; in test, no
    target is a training or dev target.
    """

    class Params(PairSource.Params):
        """Params of Cldr."""

        locales: list[str] = param(
            "Target languages, such as 'de' or 'zh_Hant'. If there are several, a language token "
            "selects one.",
            default=["de"],
        )
        num_pairs: int = param("Pairs per language, in all splits together.", default=100_000)
        kinds: list[str] = param(
            "Kinds of phrases; a kind listed twice is drawn twice as often. Empty: all kinds.",
            default=[],
        )
        dev_fraction: float = param("Share of the sources in the dev split.", default=0.02)
        test_fraction: float = param("Share of the sources in the test split.", default=0.02)
        seed: int = param("Seed of the random phrases.", default=1)

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Draws the pairs.

        Raises:
          InputError: a locale or kind does not exist, or the kinds do not give enough pairs.
        """
        super().__init__(params, split=split)
        p = self.params
        check_fractions(p)
        if not p.locales or len(set(p.locales)) != len(p.locales):
            raise InputError(
                f"{p.path_of('locales')} is {list(p.locales)}, must be one or more, each once"
            )
        if p.num_pairs < 1:
            raise ValueError(f"{p.path_of('num_pairs')} is {p.num_pairs}, but must be at least 1")
        kinds = tuple(p.kinds) or tuple(cldr_phrases.KINDS)
        unknown = [kind for kind in kinds if kind not in cldr_phrases.KINDS]
        if unknown:
            raise InputError(
                f"{p.path_of('kinds')} has unknown kinds: {', '.join(unknown)}; the kinds are "
                f"{', '.join(cldr_phrases.KINDS)}"
            )
        self.languages = self.languages_of(p)
        drawn = [pairs_of(code, p.num_pairs, kinds=kinds, seed=p.seed) for code in p.locales]
        self._pairs = [self._own(pairs) for pairs in drawn]  # by language
        self._index = JoinedIndex(len(pairs) for pairs in self._pairs)
        if not len(self):
            raise self.skips.nothing_left()

    @classmethod
    def languages_of(cls, params: Any) -> tuple[str, ...]:
        """See PairSource."""
        return tuple(params.locales) if len(params.locales) > 1 else ()

    def __len__(self) -> int:
        return len(self._index)

    def origin(self, index: int) -> Origin:
        """Returns the location of a record."""
        return Origin(f"{self.split} pair {index} of CLDR")

    def fingerprint(self) -> str:
        """Returns a digest of all records."""
        texts = (text for pairs in self._pairs for pair in pairs for text in pair)
        counts = [str(len(pairs)) for pairs in self._pairs]
        return digest(text.encode() for text in itertools.chain(self.params.locales, counts, texts))

    def describe(self) -> str:
        """Returns a short description of the source."""
        locales = self.params.locales
        names = ", ".join(locales) if len(locales) <= 5 else f"{len(locales)} languages"
        return f"CLDR phrases, English to {names}"

    def _read(self, index: int) -> Pair:
        number, within = self._index.place(index)
        return Pair(*self._pairs[number][within], *self.languages[number : number + 1])

    def _own(self, drawn: tuple[TextPair, ...]) -> list[TextPair]:
        """Returns the pairs of a language that are in this split."""
        p = self.params
        splits = [split_of(source, p.dev_fraction, p.test_fraction) for source, _ in drawn]
        before = {"train": (), "dev": ("train",), "test": ("train", "dev")}[self.split]
        known = {
            target for (_, target), split in zip(drawn, splits, strict=True) if split in before
        }
        return [
            pair
            for pair, split in zip(drawn, splits, strict=True)
            if split == self.split and pair[1] not in known
        ]


@functools.lru_cache(maxsize=128)
def pairs_of(code: str, count: int, *, kinds: tuple[str, ...], seed: int) -> tuple[TextPair, ...]:
    """Draws pairs of English and a language; every source occurs once.

    A source with two different targets is left out.

    Raises:
      InputError: CLDR does not have the language, or the kinds do not give enough pairs.
    """
    writer = Writer(code)
    targets: dict[str, str | None] = {}  # None: the source has several targets
    left = count
    for number, (phrase, source) in enumerate(_sources(kinds, seed)):
        if number >= _MOST_DRAWN * count:
            raise InputError(
                f"{number:,} phrases of the kinds {', '.join(kinds)} gave only {count - left:,} "
                f"different pairs in {code!r}, but num_pairs is {count:,}: set fewer pairs, or "
                "more kinds"
            )
        if source in targets and targets[source] is None:
            continue
        try:
            target = writer.write(phrase)
        except UnwritableError:
            continue
        if source not in targets:
            targets[source] = target
            left -= 1
            if not left:
                break
        elif targets[source] != target:
            targets[source] = None
            left += 1
    return tuple((source, target) for source, target in targets.items() if target is not None)


class _Sources:
    """Phrases and their English text, cached so that all languages use the same ones."""

    def __init__(self, kinds: tuple[str, ...], seed: int) -> None:
        self._phrases = cldr_phrases.draw(kinds, seed=seed)
        self._drawn: list[tuple[Phrase, str]] = []

    def __iter__(self) -> Iterator[tuple[Phrase, str]]:
        write = cldr_phrases.english().write
        number = 0
        while True:
            if number == len(self._drawn):
                phrase = next(self._phrases)
                self._drawn.append((phrase, write(phrase)))
            yield self._drawn[number]
            number += 1


@functools.lru_cache(maxsize=1)
def _sources(kinds: tuple[str, ...], seed: int) -> _Sources:
    return _Sources(kinds, seed)
