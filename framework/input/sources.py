"""Sources: collections of records, which are read by index or one after the other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin, SkipReport, Skips
from tekso.framework.input.splits import SPLITS, Split, load_split
from tekso.framework.params import Configurable, OldField, param

S = TypeVar("S", bound="Source")


class Source(Configurable):
    """Base class of sources. A source is one split of a collection of records.

    A subclass defines `__len__`, `_read(i)`, `origin(i)`, `fingerprint()` and `describe()`, and
    optionally a faster `_read_all`. For a malformed record, `source[i]` raises BadRecordError, and
    `records()` skips it.
    """

    class Params(Configurable.Params):
        """Params of Source."""

        max_skipped: int = param(
            "Maximum number of malformed files or records that are skipped; more are an error.",
            default=10,
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Opens the split.

        Raises:
          InputError: it is missing, or too many files or records are malformed.
        """
        super().__init__(params)
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}, only {', '.join(SPLITS)}")
        self.split = split
        self.skips = Skips(
            self.params.max_skipped,
            what=f"{self.describe()}, split {split}",
            limit_name=self.params.path_of("max_skipped"),
        )

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """Returns which setting is empty without which the split has no data, or ""; reads nothing.

        A subclass that has such settings raises an InputError with this text when it is built.
        """
        del params, split
        return ""

    def __len__(self) -> int:
        """Number of records, including malformed ones that have not been detected yet."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """Returns a record.

        Raises:
          BadRecordError: it is malformed.
          IndexError: the index is out of range.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}: {self.describe()}")
        return self._read(index)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Returns a digest of the records; different data has a different fingerprint."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns a short description of the collection."""
        raise NotImplementedError

    def skipped(self) -> SkipReport:
        """Returns a report of the records skipped so far."""
        return self.skips.report

    def records(self) -> Iterator[tuple[Origin, Any]]:
        """Yields (position, record) of all records in order; malformed records are skipped.

        Raises:
          InputError: more than max_skipped are malformed, or no record is left.
        """
        for _, origin, record in self.numbered_records():
            yield origin, record

    def numbered_records(self) -> Iterator[tuple[int, Origin, Any]]:
        """Yields (index, position, record) like `records`; `source[index]` reads the record again.

        Raises:
          InputError: more than max_skipped are malformed, or no record is left.
        """
        some = False
        for index, (origin, record) in enumerate(self._read_all()):
            if isinstance(record, BadRecordError):
                self.skips.add(record.origin, record.reason)
                continue
            some = True
            yield index, origin, record
        if not some:
            raise self.skips.nothing_left()

    def pieces(self) -> Iterator[TextPiece]:
        """Yields all records like `records`; a long text may be divided into several pieces.

        Raises:
          InputError: more than max_skipped are malformed, or no record is left.
        """
        for origin, record in self.records():
            yield TextPiece(origin, record)

    def _read(self, index: int) -> Any:
        raise NotImplementedError

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        """Yields (position, record) of all records; a malformed record is a BadRecordError."""
        for index in range(len(self)):
            try:
                record = self._read(index)
            except BadRecordError as error:
                record = error
            yield self.origin(index), record


class TextPiece(NamedTuple):
    """A record, or a piece of a text that is too long to be read as a whole.

    Attributes:
      origin: position of the piece.
      record: the record; a piece of a text ends with a line end, unless it is the last.
      is_last: whether it is the last piece of its record.
    """

    origin: Origin
    record: Any
    is_last: bool = True


class InMemory(Source):
    """Texts or arrays of token ids in memory: those of the Params, or of a method `load`.

        class Poems(InMemory):
            def load(self, split):
                return [poem.text for poem in read_poems() if poem.split == split]

    `load` returns a sequence, the same in every call.
    """

    class Params(Source.Params):
        """Params of InMemory."""

        old_fields: ClassVar[Mapping[str, OldField]] = {
            "load": OldField("override the method load() in a subclass")
        }

        train: list[str] = param("Texts to train on.", default=[])
        dev: list[str] = param("Texts of the split dev.", default=[])
        test: list[str] = param("Texts of the split test.", default=[])

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Loads the texts of the split.

        Raises:
          InputError: there are none.
        """
        super().__init__(params, split=split)
        self._records = load_split(self, split)
        if not len(self._records):
            raise InputError(f"{self.describe()}: the split {split} has no texts")

    def load(self, split: Split) -> Sequence[Any]:
        """Returns the texts, or arrays of token ids, of a split ("train", "dev", "test")."""
        texts: Sequence[Any] = self.params.get(split)
        return texts

    def __len__(self) -> int:
        return len(self._records)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"{self.split} text {index} in memory")

    def fingerprint(self) -> str:
        """Returns a digest of the records."""
        return digest(_as_bytes(record) for record in self._records)

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return "texts in memory"

    def _read(self, index: int) -> Any:
        return self._records[index]


@dataclasses.dataclass(frozen=True)
class TrainingText:
    """The text from which a tokenizer learns its table.

    Attributes:
      texts: returns an iterable over all texts, each time it is called.
      fingerprint: returns the digest of the texts.
      name: short description of the collection.
      verify: whether a stored table must have been made from exactly this text.
    """

    texts: Callable[[], Iterable[str]]
    fingerprint: Callable[[], str]
    name: str
    verify: bool = True


def training_source(own: S, corpus: Any) -> tuple[Callable[[], S], str]:
    """Returns a function that opens the training split of a corpus once, and the split's name.

    Args:
      own: the source that an input has opened; used if it is this split.
      corpus: Params of the corpus.
    """
    is_own = own.split == "train" and own.params == corpus
    opened = [own] if is_own else []

    def source() -> S:
        if not opened:
            opened.append(corpus.instantiate(split="train"))
        return opened[0]

    return source, own.describe() if is_own else corpus.owner.__name__


def training_text(
    own: S, corpus: Any, *, texts: Callable[[S], Iterable[str]], verify: bool
) -> TrainingText:
    """Returns the text to learn a vocabulary from: training text, never held-out text.

    Args:
      own: the source that an input has opened.
      corpus: Params of the corpus of the training input.
      texts: returns the texts of a source.
      verify: whether a stored table must have been made from exactly this text.
    """
    source, name = training_source(own, corpus)
    return TrainingText(
        texts=lambda: texts(source()),
        fingerprint=lambda: source().fingerprint(),
        name=name,
        verify=verify,
    )


class Digest:
    """A digest of a sequence of byte strings, including their lengths.

    The bytes of a string can be given in several blocks, so that it need not be in memory.
    """

    def __init__(self) -> None:
        self._total = hashlib.blake2b(digest_size=16)

    def begin(self, size: int) -> None:
        """Begins a string of `size` bytes."""
        self._total.update(size.to_bytes(8, "little"))

    def update(self, block: bytes | memoryview) -> None:
        """Adds bytes of the current string."""
        self._total.update(block)

    def add(self, data: bytes) -> None:
        """Adds a whole string."""
        self.begin(len(data))
        self.update(data)

    def hexdigest(self) -> str:
        """Returns the digest of the strings so far."""
        return self._total.hexdigest()


def digest(parts: Iterable[bytes]) -> str:
    """Returns a digest of a sequence of byte strings, including their lengths."""
    total = Digest()
    for data in parts:
        total.add(data)
    return total.hexdigest()


def _as_bytes(record: Any) -> bytes:
    if isinstance(record, str):
        return record.encode("utf-8", "surrogatepass")
    array = np.ascontiguousarray(record)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
