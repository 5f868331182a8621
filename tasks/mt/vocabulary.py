"""Training text for the tokenizers of pairs: one side, or both sides alternating."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from tekso.tasks.mt.pairs import Pair, PairSource

Side = Literal["source", "target", "both"]


def side_texts(source: PairSource, side: Side) -> Iterator[str]:
    """Yields the texts of one side, or of both, of all pairs of a corpus; see `texts_of`."""
    return texts_of((pair for _, pair in source.records()), side)


def texts_of(pairs: Iterable[Pair], side: Side) -> Iterator[str]:
    """Yields the texts of one side, or of both; half of the pairs then yield the target first.

    The Thue-Morse sequence determines these pairs. Learning subword pieces may repeatedly drop
    every other text to reduce their number, and this order keeps both sides in equal parts.
    """
    for number, pair in enumerate(pairs):
        if side != "both":
            yield pair.source if side == "source" else pair.target
        elif number.bit_count() % 2 == 0:
            yield pair.source
            yield pair.target
        else:
            yield pair.target
            yield pair.source
