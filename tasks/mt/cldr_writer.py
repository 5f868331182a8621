"""Writes phrases (a date, an amount of money, a list of countries, …) in a language, using CLDR.

A phrase is a hashable tuple: the name of a method of Writer, and its arguments. For example:
("amount", "3.5", "length-kilometer", "long").

Source: Unicode CLDR, as included in the package Babel; UTS 35 defines how patterns are used.
"""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

from babel import Locale, UnknownLocaleError, dates, lists, numbers

from tekso.framework.input.errors import InputError

Phrase = tuple[Any, ...]

_PLAIN_SPACES = {ord(space): " " for space in "\u00a0\u2009\u202f"}
_UNIT_SECONDS = {
    "second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800,
    "month": 2_592_000, "year": 31_536_000,
}  # fmt: skip


class UnwritableError(Exception):
    """CLDR lacks the data to write a phrase in a language."""


class Writer:
    """Writes phrases in one language, in Latin digits.

    No-break and thin spaces, which nobody types, are replaced by plain spaces.

    Args:
      code: code of the language, such as "de" or "zh_Hant".

    Raises:
      InputError: CLDR does not have the language.
    """

    def __init__(self, code: str) -> None:
        try:
            self.locale = Locale.parse(code)
        except (UnknownLocaleError, ValueError) as error:
            raise InputError(f"CLDR has no locale {code!r}") from error
        # Babel has no public access to these two.
        self._unit_patterns: Any = self.locale._data["unit_patterns"]
        self._fields: Any = self.locale._data["date_fields"]
        short = str(dates.get_time_format("short", self.locale).pattern)
        self._hours = "Hm" if "H" in short or "k" in short else "hm"

    def write(self, phrase: Phrase) -> str:
        """Returns the text of a phrase.

        Raises:
          UnwritableError: CLDR lacks the data to write it in this language.
        """
        return self._write(phrase).translate(_PLAIN_SPACES)

    def _write(self, phrase: Phrase) -> str:
        text: str = getattr(self, phrase[0])(*phrase[1:])
        if not text:
            raise UnwritableError(phrase)
        return text

    # Dates and times. A day is a proleptic Gregorian ordinal: 1 January of the year 1 is day 1.

    def date(self, day: int, width: str) -> str:
        """Writes a date with width full, long, medium or short, or a skeleton such as yMMMM."""
        value = datetime.date.fromordinal(day)
        if width in ("full", "long", "medium", "short"):
            return dates.format_date(value, width, self.locale)
        if width not in self.locale.datetime_skeletons:
            raise UnwritableError(width)
        return dates.format_skeleton(width, value, fuzzy=False, locale=self.locale)

    def time(self, second: int, width: str) -> str:
        """Writes a time of day with width medium or short."""
        return dates.format_time(_time(second), width, locale=self.locale)

    def date_time(self, day: int, second: int, width: str) -> str:
        """Writes a date with width long, medium or short, and a short time."""
        found = dates.get_datetime_format(width, self.locale)  # type: ignore[arg-type]
        pattern = str(found).replace("'", "")
        time = self.time(second, "short")
        return pattern.replace("{0}", time).replace("{1}", self.date(day, width))

    def days(self, first: int, last: int, skeleton: str) -> str:
        """Writes an interval from one day to another."""
        if skeleton not in self.locale.interval_formats:
            raise UnwritableError(skeleton)
        begin, end = datetime.date.fromordinal(first), datetime.date.fromordinal(last)
        return dates.format_interval(begin, end, skeleton, fuzzy=False, locale=self.locale)

    def hours(self, first: int, last: int) -> str:
        """Writes an interval from one time of day to another."""
        if self._hours not in self.locale.interval_formats:
            raise UnwritableError(self._hours)
        begin, end = _time(first), _time(last)
        return dates.format_interval(begin, end, self._hours, fuzzy=False, locale=self.locale)

    def relative(self, count: int, unit: str, width: str) -> str:
        """Writes a relative time such as "in 3 days"; a negative count is in the past."""
        widths = ("short", "long") if width == "short" else ("long",)
        for each in widths:  # CLDR: the long form replaces a missing short form
            fields = self._fields.get(unit if each == "long" else f"{unit}-{each}", {})
            if "future" in fields and "past" in fields:
                break
        else:
            raise UnwritableError(unit)
        return dates.format_timedelta(
            count * _UNIT_SECONDS[unit],
            granularity=unit,  # type: ignore[arg-type]
            threshold=float("inf"),
            add_direction=True,
            format=each,  # type: ignore[arg-type]
            locale=self.locale,
        )

    # Numbers are strings, so that a phrase is exact.

    def number(self, value: str) -> str:
        """Writes a number."""
        return numbers.format_decimal(Decimal(value), locale=self.locale)

    def compact(self, value: str) -> str:
        """Writes a large number with words, such as "1.2 million"."""
        for width in ("long", "short"):  # CLDR: the short form replaces a missing long form
            if width in self.locale.compact_decimal_formats:
                return numbers.format_compact_decimal(
                    Decimal(value),
                    format_type=width,
                    locale=self.locale,
                    fraction_digits=1,
                )
        raise UnwritableError(value)

    def percent(self, value: str) -> str:
        """Writes a fraction of 1 as a percentage."""
        return numbers.format_percent(
            Decimal(value), locale=self.locale, decimal_quantization=False
        )

    def money(self, value: str, currency: str, style: str) -> str:
        """Writes an amount of money, with the currency symbol (standard) or name (name)."""
        if currency not in self.locale.currencies:
            raise UnwritableError(currency)
        return numbers.format_currency(
            Decimal(value),
            currency,
            locale=self.locale,
            format_type=style,  # type: ignore[arg-type]
        )

    def amount(self, value: str, unit: str, width: str) -> str:
        """Writes a number of units, with width long or short."""
        of_unit = self._unit_patterns.get(unit, {})
        number = Decimal(value)
        plural = self.locale.plural_form(number)
        for each in (width, "short"):  # CLDR: the short form replaces a missing long form
            patterns = of_unit.get(each, {})
            if plural in patterns or "other" in patterns:
                pattern: str = patterns.get(plural) or patterns["other"]
                return pattern.replace("{0}", self.number(value))
        raise UnwritableError(unit)

    # Names and lists.

    def name(self, table: str, code: str) -> str:
        """Writes the name of a language, territory or currency."""
        found: str | None = getattr(self.locale, table).get(code)
        if not found:
            raise UnwritableError(code)
        return found

    def variety(self, language: str, territory: str) -> str:
        """Writes a language as spoken in a territory."""
        return f"{self.name('languages', language)} ({self.name('territories', territory)})"

    def listed(self, style: str, *phrases: Phrase) -> str:
        """Writes a list of phrases, joined with "and" (standard) or "or"."""
        texts = [self._write(phrase) for phrase in phrases]
        return lists.format_list(texts, style, self.locale)  # type: ignore[arg-type]


def _time(second: int) -> datetime.time:
    return datetime.time(second // 3600, second // 60 % 60, second % 60)
