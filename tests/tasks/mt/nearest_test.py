"""The nearest training source, against a search written out with dictionaries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.tasks.mt.nearest import NearestSource

TEXTS = st.lists(st.text("ab c1", min_size=1, max_size=9), min_size=1, max_size=8)


def trigrams(text: str) -> set[str]:
    whole = f"\x02{text}\x02"
    return {whole[i : i + 3] for i in range(len(whole) - 2)}


def cosines(sources: list[str], query: str) -> list[float]:
    sets = [trigrams(source) for source in sources]

    def weight(piece: str) -> float:
        count = sum(piece in own for own in sets)
        return math.log(len(sets) / count) if count else 0.0

    def dot(a: set[str], b: set[str]) -> float:
        return sum(weight(piece) ** 2 for piece in a & b)

    asked = trigrams(query)
    return [dot(asked, own) / math.sqrt(dot(own, own) or 1e-300) for own in sets]


@given(sources=TEXTS, query=st.text("ab c1", min_size=1, max_size=9))
@settings(max_examples=40)
def test_it_is_the_one_with_the_highest_cosine(sources: list[str], query: str) -> None:
    index = NearestSource((source, str(i)) for i, source in enumerate(sources))
    (found,) = index.translate([query])
    expected = cosines(sources, query)
    assert expected[int(found)] == pytest.approx(max(expected), rel=1e-9, abs=1e-9)


def test_a_known_source_has_its_own_target() -> None:
    pairs = [(f"{i} days ago", f"vor {i} Tagen") for i in range(50)]
    index = NearestSource(pairs)
    assert list(index.translate(source for source, _ in pairs)) == [t for _, t in pairs]


def test_nothing_to_look_up_is_refused() -> None:
    with pytest.raises(ValueError, match="no training pair"):
        NearestSource([])
