"""Sources: collections of records, read by index or one after the other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tekso.framework.input.skips import BadRecordError, InputError, Origin, SkipReport, Skips
from tekso.framework.input.splits import SPLITS, Split
from tekso.framework.params import Configurable, param


class Source(Configurable):
    """One split of a collection of records.

    A subclass has `__len__`, `_read(i)`, `origin(i)` and `fingerprint()`; it may have a faster
    `_read_all`. What cannot be read raises BadRecordError from `source[i]`; `records()` skips it.
    """

    class Params(Configurable.Params):
        """Params of Source."""

        max_skipped: int = param(
            "Malformed files or records that are skipped before it is an error.", default=10
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Opens the split.

        Raises:
          InputError: it is missing, or too much of it is malformed.
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

    def __len__(self) -> int:
        """Number of records, the malformed ones that are not found out yet among them."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Any:
        """A record.

        Raises:
          BadRecordError: it is malformed.
          IndexError: there is none of this index.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}: {self.describe()}")
        return self._read(index)

    def origin(self, index: int) -> Origin:
        """Where a record lies."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A digest of what the records hold: other data, other fingerprint."""
        raise NotImplementedError

    def describe(self) -> str:
        """The collection in a few words."""
        raise NotImplementedError

    def skipped(self) -> SkipReport:
        """What was skipped so far."""
        return self.skips.report

    def records(self) -> Iterator[tuple[Origin, Any]]:
        """All records in order, each with where it lies; malformed ones are skipped.

        Raises:
          InputError: more than max_skipped are malformed, or none is left.
        """
        for _, origin, record in self.numbered_records():
            yield origin, record

    def numbered_records(self) -> Iterator[tuple[int, Origin, Any]]:
        """As `records`, each with its index, too: `source[index]` reads it again."""
        some = False
        for index, (origin, record) in enumerate(self._read_all()):
            if isinstance(record, BadRecordError):
                self.skips.add(record.origin, record.reason)
                continue
            some = True
            yield index, origin, record
        if not some:
            raise self.skips.nothing_left()

    def _read(self, index: int) -> Any:
        raise NotImplementedError

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        """All records, or in the place of one the BadRecordError that says why not."""
        for index in range(len(self)):
            try:
                record = self._read(index)
            except BadRecordError as error:
                record = error
            yield self.origin(index), record


class InMemory(Source):
    """Texts, or arrays of tokens, that are in memory already."""

    class Params(Source.Params):
        """Params of InMemory."""

        train: list[str] = param("Texts to train on.", default=[])
        dev: list[str] = param("Texts held out.", default=[])
        test: list[str] = param("Texts held out to the end.", default=[])
        load: Callable[..., Any] | None = param(
            "Instead of these: a function of the split that returns a sequence of texts, or of "
            "arrays of token ids. A run with a logdir cannot store a function: write a Source.",
            default=None,
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Takes the texts of the split."""
        super().__init__(params, split=split)
        p = self.params
        if p.load is not None and (p.train or p.dev or p.test):
            raise InputError("texts in memory: give either texts or load, not both")
        self._records: Sequence[Any] = p.get(split) if p.load is None else p.load(split)
        if not len(self._records):
            raise InputError(f"texts in memory: there is none in the split {split}")

    def __len__(self) -> int:
        return len(self._records)

    def origin(self, index: int) -> Origin:
        """Where a record lies."""
        return Origin(f"{self.split} text {index} in memory")

    def fingerprint(self) -> str:
        """A digest of what the records hold."""
        return digest(_as_bytes(record) for record in self._records)

    def describe(self) -> str:
        """The collection in a few words."""
        return "texts in memory"

    def _read(self, index: int) -> Any:
        return self._records[index]


@dataclasses.dataclass(frozen=True)
class TrainingText:
    """What a tokenizer learns its table from.

    Attributes:
      texts: gives the texts, from the first on, every time it is called.
      fingerprint: gives their digest.
      name: the collection in a few words.
      verify: whether a table that is there already must have been made from this very text.
    """

    texts: Callable[[], Iterable[str]]
    fingerprint: Callable[[], str]
    name: str
    verify: bool = True


def digest(parts: Iterable[bytes]) -> str:
    """A digest of byte strings, one after the other; where one ends counts."""
    total = hashlib.blake2b(digest_size=16)
    for data in parts:
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def _as_bytes(record: Any) -> bytes:
    if isinstance(record, str):
        return record.encode("utf-8", "surrogatepass")
    array = np.ascontiguousarray(record)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
