"""CLDR as a parallel corpus: what is written, each source once, splits apart, no ambiguity."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from typing import Any

import numpy as np
import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.mt import cldr_phrases
from tekso.tasks.mt.cldr import LOCALES, Cldr, pairs_of
from tekso.tasks.mt.cldr_writer import UnwritableError, Writer
from tekso.tasks.mt.pairs import Pair

DAY = datetime.date(2026, 5, 7).toordinal()


def corpus(split: Any = "train", **kwargs: Any) -> Cldr:
    kwargs = {"num_pairs": 600, "dev_fraction": 0.2, "test_fraction": 0.1, **kwargs}
    one: Cldr = Cldr.Params(**kwargs).instantiate(split=split)
    return one


def all_of(one: Cldr) -> list[Pair]:
    return [record for _, record in one.records()]


@pytest.mark.parametrize(
    ("phrase", "source", "target"),
    [
        (("date", DAY, "full"), "Thursday, May 7, 2026", "Donnerstag, 7. Mai 2026"),
        (("date", DAY, "short"), "5/7/26", "07.05.26"),
        (("time", 3600 * 15 + 300, "short"), "3:05 PM", "15:05"),
        (("days", DAY, DAY + 2, "MMMd"), "May 7 – 9", "7.–9. Mai"),
        (("number", "-1234567.5"), "-1,234,567.5", "-1.234.567,5"),
        (("percent", "0.125"), "12.5%", "12,5 %"),
        (("compact", "1200000"), "1.2 million", "1,2 Millionen"),
        (("money", "1234.5", "EUR", "standard"), "€1,234.50", "1.234,50 €"),
        (("money", "2", "CHF", "name"), "2.00 Swiss francs", "2,00 Schweizer Franken"),
        (("amount", "1", "duration-week", "long"), "1 week", "1 Woche"),
        (("amount", "3.5", "duration-week", "long"), "3.5 weeks", "3,5 Wochen"),
        (("relative", -3, "month", "long"), "3 months ago", "vor 3 Monaten"),
        (("relative", 1, "day", "long"), "in 1 day", "in 1 Tag"),
        (("variety", "de", "AT"), "German (Austria)", "Deutsch (Österreich)"),
        (
            ("listed", "or", *(("name", "territories", code) for code in ("FR", "DE", "IT"))),
            "France, Germany, or Italy",
            "Frankreich, Deutschland oder Italien",
        ),
    ],
)
def test_a_phrase_is_written_as_people_write_it(phrase: Any, source: str, target: str) -> None:
    assert Writer("en").write(phrase) == source
    assert Writer("de").write(phrase) == target


def test_spaces_are_those_that_people_type() -> None:
    texts = [text for pair in pairs_of("fr", 600, kinds=("date", "time", "money"), seed=2)
             for text in pair]  # fmt: skip
    assert not any(space in text for text in texts for space in "\u00a0\u202f\u2009")


def test_unknown_words_are_reported_and_unknown_languages_refused() -> None:
    with pytest.raises(UnwritableError):
        Writer("de").write(("name", "territories", "XYZ"))
    with pytest.raises(InputError, match="no locale 'qqq'"):
        Writer("qqq")


def test_pairs_are_as_many_as_wanted_and_those_of_the_seed() -> None:
    kinds = tuple(cldr_phrases.KINDS)
    first = pairs_of("ru", 500, kinds=kinds, seed=1)
    assert len({source for source, _ in first}) == len(first) == 500
    pairs_of.cache_clear()
    assert pairs_of("ru", 500, kinds=kinds, seed=1) == first
    assert pairs_of("ru", 300, kinds=kinds, seed=1) == first[:300]
    assert pairs_of("ru", 500, kinds=kinds, seed=2) != first


@pytest.mark.parametrize("kind", [kind for kind in cldr_phrases.KINDS])
def test_every_kind_gives_different_pairs(kind: str) -> None:
    pairs = pairs_of("pl", 200, kinds=(kind,), seed=3)
    assert len(pairs) == 200
    assert sum(source != target for source, target in pairs) > 100


def test_no_source_and_no_target_of_training_is_in_dev_or_test() -> None:
    splits = {split: all_of(corpus(split)) for split in ("train", "dev", "test")}
    sources = {split: {pair.source for pair in pairs} for split, pairs in splits.items()}
    targets = {split: {pair.target for pair in pairs} for split, pairs in splits.items()}
    for one, other in itertools.combinations(splits, 2):
        assert not sources[one] & sources[other]
        assert not targets[one] & targets[other]
    total = sum(map(len, splits.values()))
    assert 580 <= total <= 600
    assert abs(len(splits["dev"]) / total - 0.2) < 0.05
    assert abs(len(splits["test"]) / total - 0.1) < 0.05


def test_targets_that_were_trained_on_are_not_held_out() -> None:
    # English tells "5 ft" from "5 feet"; where a language does not, both are one target.
    kinds = {"kinds": ["amount"], "locales": ["de"], "num_pairs": 4000, "dev_fraction": 0.5}
    whole = pairs_of("de", 4000, kinds=("amount",), seed=1)
    assert len({target for _, target in whole}) < len(whole)
    train, dev = all_of(corpus("train", **kinds)), all_of(corpus("dev", **kinds))
    assert not {pair.target for pair in train} & {pair.target for pair in dev}


def test_several_languages_are_named_and_split_alike() -> None:
    locales = ["de", "ja", "ar"]
    train, dev = (corpus(split, locales=locales) for split in ("train", "dev"))
    assert train.languages == ("de", "ja", "ar")
    assert {pair.language for pair in all_of(train)} == set(locales)
    assert not {pair.source for pair in all_of(train)} & {pair.source for pair in all_of(dev)}
    assert corpus().languages == () and all_of(corpus())[0].language == ""


def test_english_says_which_phrase_it_is() -> None:
    """Whatever is drawn: phrases that are equal in English are equal in other languages."""
    phrases = set(itertools.islice(cldr_phrases.draw(tuple(cldr_phrases.KINDS), seed=5), 30_000))
    english, writers = cldr_phrases.english(), [Writer(code) for code in ("de", "ru", "ar")]
    by_source: dict[str, list[Any]] = {}
    for phrase in phrases:
        by_source.setdefault(english.write(phrase), []).append(phrase)
    alike = [group for group in by_source.values() if len(group) > 1]
    assert len(alike) > 50
    for group in alike:
        for writer in writers:
            with contextlib.suppress(UnwritableError):
                assert len({writer.write(phrase) for phrase in group}) == 1, group


def test_the_short_name_of_may_is_never_drawn() -> None:
    for phrase in itertools.islice(cldr_phrases.draw(("date", "date_time"), seed=1), 2000):
        month = datetime.date.fromordinal(phrase[1]).month
        assert not (phrase[-1] == "medium" and month == 5)
        assert 1950 <= datetime.date.fromordinal(phrase[1]).year < 2050


def test_a_source_with_two_targets_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    phrases = [("number", "1"), ("percent", "0.01"), ("number", "2"), ("number", "3")]
    texts = {"en": ["one", "one", "two", "three"], "xx": ["eins", "1 %", "zwei", "drei"]}
    monkeypatch.setattr(cldr_phrases, "draw", lambda kinds, seed: itertools.cycle(phrases))

    class Given:
        def __init__(self, code: str) -> None:
            self.texts = texts[code]

        def write(self, phrase: Any) -> str:
            return self.texts[phrases.index(phrase)]

    from tekso.tasks.mt import cldr

    monkeypatch.setattr(cldr, "Writer", Given)
    monkeypatch.setattr(cldr_phrases, "english", lambda: Given("en"))
    cldr._sources.cache_clear()
    try:
        found = cldr.pairs_of.__wrapped__("xx", 2, kinds=("number",), seed=0)
    finally:
        cldr._sources.cache_clear()
    assert found == (("two", "zwei"), ("three", "drei"))


def test_a_hundred_languages_can_be_written() -> None:
    assert len(LOCALES) == len(set(LOCALES)) >= 100
    phrases = list(itertools.islice(cldr_phrases.draw(tuple(cldr_phrases.KINDS), seed=7), 100))
    written = []
    for code in LOCALES:
        writer, count = Writer(code), 0
        for phrase in phrases:
            try:
                count += bool(writer.write(phrase))
            except UnwritableError:
                continue
        written.append(count)
    assert min(written) >= 95 and np.mean(written) > 98


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"locales": []}, "locales is .*must be one or more"),
        ({"locales": ["de", "de"]}, "each once"),
        ({"locales": ["xx_YY"]}, "no locale 'xx_YY'"),
        ({"kinds": ["dates"]}, "kinds has unknown kinds: dates; the kinds are date, time"),
        ({"kinds": ["name"], "num_pairs": 1000}, r"only 629 different pairs in 'de'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(kwargs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        corpus(**kwargs)
