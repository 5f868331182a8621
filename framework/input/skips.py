"""Malformed data: counted, named, skipped up to a limit, then an error that a person can act on."""

from __future__ import annotations

import dataclasses
from typing import Any

SHOWN = 5  # how many an error lists
KEPT = 100  # how many a report names; it counts all


class InputError(ValueError):
    """The data cannot be used; the text says what is wrong and what to do."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a record lies.

    Attributes:
      file: path of the file, or the name of what is no file.
      offset: first byte of the record in it; for what is no file, its index.
    """

    file: str
    offset: int = 0


class BadRecordError(InputError):
    """One record cannot be read."""

    def __init__(self, origin: Origin, reason: str) -> None:
        super().__init__(f"{origin.file}, byte {origin.offset}: {reason}")
        self.origin = origin
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Skip:
    """One skipped file or record."""

    file: str
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, byte {self.offset}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class SkipReport:
    """What was skipped: how many, and the first of them by name."""

    count: int = 0
    named: tuple[Skip, ...] = ()

    def __add__(self, other: SkipReport) -> SkipReport:
        return SkipReport(self.count + other.count, (self.named + other.named)[:KEPT])

    def __str__(self) -> str:
        lines = [f"  {skip}" for skip in self.named[:SHOWN]]
        if self.count > len(lines):
            lines.append(f"  … and {self.count - len(lines)} more")
        return "\n".join([f"{self.count} skipped", *lines])

    def to_json(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> SkipReport:
        """Reads what `to_json` gave."""
        return SkipReport(fields["count"], tuple(Skip(**skip) for skip in fields["named"]))


class Skips:
    """Collects what is skipped.

    Args:
      limit: how many may be skipped.
      what: the data, in the words of errors.
      limit_name: path of the limit, for errors.
    """

    def __init__(self, limit: int, *, what: str, limit_name: str = "max_skipped") -> None:
        if limit < 0:
            raise ValueError(f"{limit_name} is {limit}, but it has to be at least 0")
        self.report = SkipReport()
        self._seen: set[Origin] = set()
        self._limit = limit
        self._what = what
        self._limit_name = limit_name

    def add(self, origin: Origin, reason: str) -> None:
        """Counts one, unless it was counted in an earlier pass over the data.

        Raises:
          InputError: these are more than the limit.
        """
        if origin in self._seen:
            return
        self._seen.add(origin)
        skip = Skip(origin.file, int(origin.offset), reason)
        self.report += SkipReport(1, (skip,))
        if self.report.count > self._limit:
            raise InputError(
                f"{self._what}: more than {self._limit_name}={self._limit} are malformed: "
                f"{self.report}\nRepair or leave out these files, or set a higher limit."
            )

    def nothing_left(self) -> InputError:
        """The error that all was skipped, or nothing was there."""
        if self.report.count:
            return InputError(f"{self._what}: nothing is left to read: {self.report}")
        return InputError(f"{self._what}: there is nothing to read")
