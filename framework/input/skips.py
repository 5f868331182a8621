"""Malformed data: counted, reported and skipped up to a limit; beyond the limit it is an error."""

from __future__ import annotations

import dataclasses
from typing import Literal

from tekso.framework.input.errors import InputError

SHOWN = 5  # number of records that an error message lists
_CONVERT = "to convert a file from another encoding: iconv -f latin1 -t utf-8 FILE > NEW_FILE"
KEPT = 100  # number of records that a report lists; it counts all


@dataclasses.dataclass(frozen=True)
class Origin:
    """The position of a record; `str` shows it as "FILE, byte 17", "NAME, record 3" or "FILE".

    Attributes:
      file: path of the file; the name of the source if it is not a file.
      offset: first byte of the record in the file, or index of the record; None: the record is all
        of `file`.
      unit: what `offset` counts.
    """

    file: str
    offset: int | None = None
    unit: Literal["byte", "record"] = "byte"

    def __str__(self) -> str:
        return self.file if self.offset is None else f"{self.file}, {self.unit} {self.offset}"

    def at(self, byte: int) -> Origin:
        """Returns the position of a byte of the record; of the record, if records are counted."""
        if self.unit == "record":
            return self
        return Origin(self.file, (self.offset or 0) + byte)


class BadRecordError(InputError):
    """One record cannot be read."""

    def __init__(self, origin: Origin, reason: str) -> None:
        super().__init__(f"{origin}: {reason}")
        self.origin = origin
        self.reason = reason


def reason_of(error: Exception) -> str:
    """Returns why a file or record cannot be read, without its name."""
    if isinstance(error, BadRecordError):
        return error.reason
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def first_line(error: Exception) -> str:
    """Returns the first line of the text of an error, or its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


@dataclasses.dataclass(frozen=True)
class Skip:
    """One skipped file or record, at an `Origin`."""

    file: str
    offset: int | None
    reason: str
    unit: Literal["byte", "record"] = "byte"

    @property
    def origin(self) -> Origin:
        """Its position."""
        return Origin(self.file, self.offset, self.unit)

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class SkipReport:
    """The number of skipped files and records, and the positions of the first ones."""

    count: int = 0
    named: tuple[Skip, ...] = ()

    def __add__(self, other: SkipReport) -> SkipReport:
        return SkipReport(self.count + other.count, (self.named + other.named)[:KEPT])

    def __str__(self) -> str:
        lines = [f"  {skip}" for skip in self.named[:SHOWN]]
        if self.count > len(lines):
            lines.append(f"  … and {self.count - len(lines)} more")
        if any("not UTF-8" in skip.reason for skip in self.named):
            lines.append(f"  {_CONVERT}")
        return "\n".join([f"{self.count} skipped", *lines])


class Skips:
    """Counts skipped files and records, up to a limit.

    Args:
      limit: maximum number of skipped files and records.
      what: description of the data, for error messages.
      limit_name: path of the limit in the Params, for error messages.

    Attributes:
      all: what was skipped, at most `limit` files and records.
      why_nothing: why there may be nothing to read, and what to set; the end of an error, or "".
    """

    def __init__(self, limit: int, *, what: str, limit_name: str = "max_skipped") -> None:
        if limit < 0:
            raise ValueError(f"{limit_name} is {limit}, but must be at least 0")
        self.report = SkipReport()
        self.all: list[Skip] = []
        self.why_nothing = ""
        self._seen: set[tuple[str, int]] = set()
        self._limit = limit
        self._what = what
        self._limit_name = limit_name

    def add(self, origin: Origin, reason: str) -> None:
        """Counts a record, unless it was counted in an earlier pass over the data.

        Raises:
          InputError: the count exceeds the limit.
        """
        place = origin.file, origin.offset or 0  # token caches written earlier have 0 for files
        if place in self._seen:
            return
        self._seen.add(place)
        offset = None if origin.offset is None else int(origin.offset)
        skip = Skip(origin.file, offset, reason, origin.unit)
        self.report += SkipReport(1, (skip,))
        self.all.append(skip)
        if self.report.count > self._limit:
            raise InputError(
                f"{self._what}: more than {self._limit_name}={self._limit} are malformed: "
                f"{self.report}\nRepair or remove these files, or set a higher limit."
            )

    def nothing_left(self) -> InputError:
        """Returns the error for data that is empty, or of which everything was skipped."""
        if self.report.count:
            return InputError(
                f"{self._what}: nothing is left to read: {self.report}\nRepair these files, give "
                "other files for this split, or hold out a larger part of the training files."
            )
        return InputError(f"{self._what}: there is nothing to read{self.why_nothing}")
