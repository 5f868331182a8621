"""Parallel corpora: sources whose records are pairs of a text and its translation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.splits import Split, load_split
from tekso.framework.input.text import NotTextError, check_text, to_text
from tekso.framework.params import OldField, param


class Pair(NamedTuple):
    """A text, its translation and the target language.

    Attributes:
      source: the text.
      target: its translation.
      language: the target language; empty if the corpus has only one.
    """

    source: str
    target: str
    language: str = ""


class PairSource(Source):
    """Base of parallel corpora: every record is a Pair of two texts that are not blank.

    Attributes:
      languages: target languages that records name, in the order of their tokens; empty if there
        is only one, which then has no name.
    """

    class Params(Source.Params):
        """Params of PairSource."""

        max_skipped: int = param(
            "Most malformed or blank pairs (or files) that are skipped; more are an error. Large "
            "corpora have some.",
            default=1000,
        )

    languages: tuple[str, ...] = ()

    @classmethod
    def languages_of(cls, params: Any) -> tuple[str, ...]:
        """Returns the languages that a corpus with these Params names, without reading data."""
        return tuple(params.languages) if "languages" in params else ()


class InMemoryPairs(PairSource):
    """Pairs in memory: those of the Params, or of a method `load`.

        class Phrases(InMemoryPairs):
            def load(self, split):
                return [(phrase.english, phrase.german) for phrase in read_phrases(split)]

    `load` returns a sequence, the same in every call.
    """

    class Params(PairSource.Params):
        """Params of InMemoryPairs."""

        old_fields: ClassVar[Mapping[str, OldField]] = {
            "load": OldField("override the method load() in a subclass")
        }

        train: list[tuple[str, ...]] = param(
            "Pairs to train on: (source, target), or (source, target, language).", default=[]
        )
        dev: list[tuple[str, ...]] = param("Pairs of the dev split.", default=[])
        test: list[tuple[str, ...]] = param("Pairs of the test split.", default=[])
        languages: list[str] = param("Target languages that pairs name.", default=[])
        max_skipped: int = param(
            "Most malformed or blank pairs that are skipped; more are an error.", default=10
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Loads the pairs of the split.

        Raises:
          InputError: there are none.
        """
        super().__init__(params, split=split)
        self._records = load_split(self, split)
        self.languages = self.languages_of(self.params)
        if not len(self._records):
            raise InputError(f"{self.describe()}: the split {split} has none")

    def load(self, split: Split) -> Sequence[Any]:
        """Returns the pairs of a split: (source, target), or (source, target, language)."""
        pairs: Sequence[Any] = self.params.get(split)
        return pairs

    def __len__(self) -> int:
        return len(self._records)

    def origin(self, index: int) -> Origin:
        """Returns the location of a record."""
        return Origin(f"{self.split} pair {index} in memory")

    def fingerprint(self) -> str:
        """Returns a digest of all records."""
        texts = (text for record in self._records for text in (str(len(record)), *record))
        return digest(text.encode("utf-8", "surrogatepass") for text in texts)

    def describe(self) -> str:
        """Returns a short description of the source."""
        return "pairs in memory"

    def _read(self, index: int) -> Pair:
        record, origin = self._records[index], self.origin(index)
        if not 2 <= len(record) <= 3:
            raise BadRecordError(origin, f"expected (source, target), got {len(record)} texts")
        pair = Pair(text_of(record[0], origin), text_of(record[1], origin), *record[2:])
        check_language(pair.language, self.languages, origin)
        return pair


def text_of(data: str | bytes, origin: Origin, where: str = "") -> str:
    """Returns one side of a pair as a checked text.

    Args:
      data: the text, or bytes of UTF-8.
      origin: location of the record.
      where: prefix of the error message, such as "line 3: ".

    Raises:
      BadRecordError: the data is blank, or not text.
    """
    try:
        text = to_text(data) if isinstance(data, bytes) else check_text(data)
    except NotTextError as error:
        raise BadRecordError(origin.at(error.offset), f"{where}{error}") from error
    if text.isspace():
        raise BadRecordError(origin, f"{where}blank")
    return text


def check_language(
    language: str, languages: Sequence[str], origin: Origin, where: str = ""
) -> None:
    """Checks that the language of a pair is one of the languages of its corpus.

    Raises:
      BadRecordError: the corpus does not have the language.
    """
    if language not in (languages or ("",)):
        wanted = f"one of {', '.join(languages)}" if languages else "empty"
        raise BadRecordError(origin, f"{where}its language is {language!r}, must be {wanted}")
