"""The settings that a sweep varies: lists of values and ranges, given as text.

learner.schedule.initial_value=1e-3,3e-3      two values
task.model.dim=[1,2],[3]                      commas inside brackets and quotes do not separate
learner.schedule.initial_value=1e-4:1e-2:log  a range, for --search=random, tpe and halving
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from tekso.tools.command_errors import UsageError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}):({_NUMBER})(:log)?")
_LIKE_RANGE = re.compile(rf"{_NUMBER}:{_NUMBER}:(?:[a-z].*|)")
_LARGEST = 1e18  # a whole number of 64 bits
_OPEN, _CLOSED = "([{", ")]}"


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; whole ones if both are.

    Attributes:
      low: smallest value.
      high: largest value.
      is_log: whether their logarithms are searched.
    """

    low: float
    high: float
    is_log: bool

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclasses.dataclass(frozen=True)
class Varied:
    """A setting that a sweep varies.

    Attributes:
      path: path of the field of Params.
      values: texts of its values; empty for a range.
      range: the range; None for a list of values.
    """

    path: str
    values: Sequence[str]
    range: Range | None = None

    @property
    def examples(self) -> Sequence[str]:
        """All values, or the ends of the range."""
        return self.values if self.range is None else (repr(self.range.low), repr(self.range.high))

    @property
    def choices(self) -> Sequence[str | int]:
        """All values, also of a range of whole numbers."""
        if self.range is None:
            return self.values
        return range(int(self.range.low), int(self.range.high) + 1)


def parse(text: str) -> Varied:
    """Returns the setting that --sweep gives.

    Raises:
      UsageError: the text is not "path=values".
    """
    path, equals, values = text.partition("=")
    if not equals or not path.strip() or not values.strip():
        raise UsageError(
            f"--sweep {text}: expected path=value,value as in --sweep input.batch_size=32,64"
        )
    if found := _RANGE.fullmatch(values.strip()):
        low, high = (_number(found[i]) for i in (1, 2))
        if low >= high or (found[3] and low <= 0) or max(-low, high) > _LARGEST:
            raise UsageError(
                f"--sweep {text:.80}: expected low:high with low < high, above 0 with :log, and at "
                f"most {_LARGEST:g}"
            )
        return Varied(path.strip(), (), Range(low, high, bool(found[3])))
    if _LIKE_RANGE.fullmatch(values.strip()):
        raise UsageError(f"--sweep {text:.80}: a range is low:high or low:high:log")
    found_values = _split(values)
    if "" in found_values:
        raise UsageError(f"--sweep {text}: a value is empty; quote an empty text: ''")
    return Varied(path.strip(), tuple(dict.fromkeys(found_values)))


def _number(text: str) -> float:
    is_whole = re.fullmatch(r"[-+]?\d+", text) and abs(float(text)) <= _LARGEST
    return int(text) if is_whole else float(text)


def _split(text: str) -> list[str]:
    """Splits at commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in _OPEN) - (letter in _CLOSED) if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def grid(varied: Sequence[Varied]) -> list[dict[str, str]]:
    """Returns all combinations of values, {path: text}.

    Raises:
      UsageError: a setting has a range.
    """
    for one in varied:
        if one.range is not None:
            raise UsageError(
                f"--sweep {one.path} has a range: give values, or add --search=random --trials=N"
            )
    paths = [one.path for one in varied]
    combinations = itertools.product(*(one.values for one in varied))
    return [dict(zip(paths, values, strict=True)) for values in combinations]
