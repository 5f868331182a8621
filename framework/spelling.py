"""Suggestions for misspelt names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_matches(
    word: str, names: Iterable[str], *, count: int = 3, cutoff: float = 0.6
) -> list[str]:
    """Returns the names that are similar to a word in any case, the most similar first.

    Args:
      word: the misspelt name.
      names: the allowed names.
      count: largest number of names returned.
      cutoff: smallest similarity, from 0 to 1.
    """
    by_folded: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_folded.setdefault(name.casefold(), []).append(name)
    close = difflib.get_close_matches(word.casefold(), by_folded, n=count, cutoff=cutoff)
    return [name for folded in close for name in by_folded[folded]][:count]
