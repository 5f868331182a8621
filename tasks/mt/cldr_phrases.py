"""Draws random phrases whose English text is unambiguous.

The English text must contain everything that the translation depends on. If two widths give the
same English text, the first is used ("May 5, 2026" is long, never medium). All years are in one
span of 100 years, because a short date has two digits. Units and names with the same English text
are left out.
"""

from __future__ import annotations

import collections
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from babel import numbers

from tekso.framework.input import shuffle
from tekso.tasks.mt.cldr_writer import Phrase, UnwritableError, Writer

T = TypeVar("T")

_FIRST_DAY = datetime.date(1950, 1, 1).toordinal()
_NUM_DAYS = datetime.date(2050, 1, 1).toordinal() - _FIRST_DAY
_DATE_WIDTHS = ("full", "long", "medium", "short", "yMMMM", "MMMMd", "yMMMEd", "MMMEd", "yQQQQ")
_IN_USE = datetime.date(2025, 1, 1)  # only currencies in use on this day
_NUM_WORDS = 64  # random numbers per phrase
_TOGETHER = 4096  # phrases per block of random numbers


class Draw:
    """Random choices of one phrase."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words = iter(words)

    def below(self, end: int) -> int:
        """Draws a number in [0, end)."""
        return next(self._words) % end

    def one_of(self, items: Sequence[T]) -> T:
        """Draws one of the items."""
        return items[self.below(len(items))]

    def decimal(self, most_digits: int, most_decimals: int) -> str:
        """Draws a positive number; small numbers are about as likely as large ones."""
        number = 1 + self.below(10 ** (1 + self.below(most_digits)))
        decimals = self.below(most_decimals + 1)
        if not decimals:
            return str(number)
        fraction = f"{self.below(10**decimals):0{decimals}d}".rstrip("0")
        return f"{number}.{fraction}" if fraction else str(number)  # as it will be written


def draw(kinds: Sequence[str], *, seed: int) -> Iterator[Phrase]:
    """Yields an endless sequence of random phrases.

    Args:
      kinds: keys of KINDS; a key listed twice is drawn twice as often.
      seed: phrase i is a function of seed and i.
    """
    key = shuffle.key_of(seed, "cldr")
    first = 0
    while True:
        own = shuffle.fold(key, np.arange(first, first + _TOGETHER))
        for words in shuffle.fold(own[:, None], np.arange(_NUM_WORDS)).tolist():
            one = Draw(words)
            yield KINDS[one.one_of(kinds)](one)
        first += _TOGETHER


# The kinds.


def _day(one: Draw) -> int:
    return _FIRST_DAY + one.below(_NUM_DAYS)


def _is_may(day: int) -> bool:
    """Returns whether the day is in May, whose short and long English names are the same."""
    return datetime.date.fromordinal(day).month == 5


def _date(one: Draw) -> Phrase:
    day, width = _day(one), one.one_of(_DATE_WIDTHS)
    return "date", day, "long" if width == "medium" and _is_may(day) else width


def _time(one: Draw) -> Phrase:
    width = one.one_of(("short", "medium"))
    return "time", one.below(1440) * 60 + (one.below(60) if width == "medium" else 0), width


def _date_time(one: Draw) -> Phrase:
    day, width = _day(one), one.one_of(("long", "medium", "short"))
    width = "long" if width == "medium" and _is_may(day) else width
    return "date_time", day, one.below(1440) * 60, width


def _interval(one: Draw) -> Phrase:
    skeleton = one.one_of(("yMMMd", "yMMMEd", "MMMd", "yMMMM", "hours"))
    if skeleton == "hours":
        first = one.below(1439)
        return "hours", first * 60, (first + 1 + one.below(1439 - first)) * 60
    day = _day(one)
    longest = one.one_of((20, 300)) if skeleton != "yMMMM" else 3000
    return "days", day, day + 1 + one.below(longest), skeleton


def _number(one: Draw) -> Phrase:
    if one.below(4) == 0:
        tenths = 10 + one.below(9990)
        return "compact", str(tenths * 10 ** (2 + 3 * one.below(3)))
    sign = "-" if one.below(8) == 0 else ""
    return "number", sign + one.decimal(9, 3)


def _percent(one: Draw) -> Phrase:
    hundredths = one.decimal(4, 2)
    whole, _, rest = hundredths.partition(".")
    digits = whole.zfill(3)
    return "percent", f"{digits[:-2]}.{digits[-2:]}{rest}"


def _money(one: Draw) -> Phrase:
    currency = one.one_of(_currencies())
    value = str(1 + one.below(10 ** (1 + one.below(6))))
    decimals = numbers.get_currency_precision(currency)
    if decimals:  # all decimals are written, also zeros, and plurals depend on them
        fraction = 0 if one.below(2) else one.below(10**decimals)
        value += f".{fraction:0{decimals}d}"
    return "money", value, currency, one.one_of(("standard", "name"))


def _amount(one: Draw) -> Phrase:
    unit, width = one.one_of(_units())
    return "amount", one.decimal(4, 1), unit, width


def _relative(one: Draw) -> Phrase:
    unit, width = one.one_of(_relative_units())
    count = 1 + one.below(one.one_of((10, 100, 1000)))
    return "relative", count if one.below(2) else -count, unit, width


def _name(one: Draw) -> Phrase:
    return "name", *one.one_of(_names()[one.one_of(_TABLES)])


def _names_together(one: Draw) -> Phrase:
    if one.below(4) == 0:
        language = one.one_of(_names()["languages"])[1]
        return "variety", language, one.one_of(_names()["territories"])[1]
    table = one.one_of(_TABLES)
    names = {("name", *one.one_of(_names()[table])): None for _ in range(2 + one.below(3))}
    return "listed", one.one_of(("standard", "or")), *names


def _list(one: Draw) -> Phrase:
    parts = [KINDS[one.one_of(_PARTS)](one) for _ in range(2 + one.below(2))]
    return "listed", one.one_of(("standard", "or")), *parts


KINDS: dict[str, Callable[[Draw], Phrase]] = {
    "date": _date,
    "time": _time,
    "date_time": _date_time,
    "interval": _interval,
    "number": _number,
    "percent": _percent,
    "money": _money,
    "amount": _amount,
    "relative": _relative,
    "name": _name,
    "names": _names_together,
    "list": _list,
}
_PARTS = ("date", "time", "number", "percent", "money", "amount", "relative", "name", "name")
_TABLES = ("languages", "territories", "currencies")


# What English distinguishes.


@functools.cache
def english() -> Writer:
    """Returns the writer of English sources."""
    return Writer("en")


@functools.cache
def _currencies() -> tuple[str, ...]:
    territories = [code for code in map(str, english().locale.territories) if len(code) == 2]
    used = {
        code
        for territory in territories
        for code in numbers.get_territory_currencies(
            territory, start_date=_IN_USE, end_date=_IN_USE
        )
    }
    return tuple(sorted(used & set(english().locale.currencies)))


@functools.cache
def _names() -> dict[str, list[tuple[str, str]]]:
    """Returns the entries (table, code) of each table whose English name is unique.

    Only languages with a code of two letters are included. They have a name in nearly every other
    language, and are few enough to occur often.
    """
    tables = {
        "languages": sorted(
            code for code in map(str, english().locale.languages) if len(code) == 2
        ),
        "territories": sorted(english().locale.territories),
        "currencies": list(_currencies()),
    }
    alike: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for table, codes in tables.items():
        for code in codes:
            alike[english().write(("name", table, code))].append((table, code))
    single = {entries[0] for entries in alike.values() if len(entries) == 1}
    return {
        table: [(table, code) for code in codes if (table, code) in single]
        for table, codes in tables.items()
    }


@functools.cache
def _units() -> list[tuple[str, str]]:
    """Returns the units and widths whose English texts differ."""
    units = sorted(english().locale._data["unit_patterns"])
    units.remove("concentr-percent")  # same English text as a percentage
    forms = [(unit, width) for width in ("long", "short") for unit in units]
    return _apart({form: ("amount", "3", *form) for form in forms})


@functools.cache
def _relative_units() -> list[tuple[str, str]]:
    """Returns the units of relative times, and widths, whose English texts differ."""
    units = ("second", "minute", "hour", "day", "week", "month", "year")
    forms = [(unit, width) for width in ("long", "short") for unit in units]
    return _apart({form: ("relative", 3, *form) for form in forms})


def _apart(examples: dict[tuple[str, str], Phrase]) -> list[tuple[str, str]]:
    """Returns one width per English text, and none if two units share the text."""
    alike: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for form, phrase in examples.items():
        try:
            alike[english().write(phrase)].append(form)
        except UnwritableError:
            continue
    return [forms[0] for forms in alike.values() if len({unit for unit, _ in forms}) == 1]
