"""Scores of a language model for prefixes of labels, which a search on the host adds (fusion).

    score(labels) = log P(labels | speech) + Σ_i next(labels[:i])[labels[i]] + next(labels)[end]

Legend: V tokens without the blank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Prefix = tuple[int, ...]
Scores = npt.NDArray[np.floating]


class PrefixScores(Protocol):
    """A language model on the host."""

    def next_scores(self, prefixes: Sequence[Prefix]) -> Scores:
        """Returns the scores of each token and of the end after some prefixes.

        Shapes:
          returns: [prefixes, V + 1], the end last
        """
        ...


class PrefixTotals:
    """The summed scores of prefixes; each prefix is computed once. All are 0 without a model."""

    def __init__(self, scores: PrefixScores | None) -> None:
        """Keeps the model."""
        self._scores = scores
        self._next: dict[Prefix, Any] = {}
        self._totals: dict[Prefix, float] = {(): 0.0}

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        """Computes the scores after some prefixes, those that are new in one call."""
        if self._scores is None:
            return
        new = [prefix for prefix in prefixes if prefix not in self._next]
        if new:
            found = np.asarray(self._scores.next_scores(new), np.float64)
            self._next.update(zip(new, found, strict=True))

    def total(self, prefix: Prefix) -> float:
        """Returns the score of a prefix, whose shorter prefixes must be prepared."""
        if self._scores is None:
            return 0.0
        if prefix not in self._totals:
            before = prefix[:-1]
            self._totals[prefix] = self.total(before) + float(self._next[before][prefix[-1]])
        return self._totals[prefix]

    def next(self, prefix: Prefix) -> Any:
        """Returns the scores of the tokens after a prepared prefix, [V] or 0.0."""
        return 0.0 if self._scores is None else self._next[prefix][:-1]

    def ended(self, prefix: Prefix) -> float:
        """Returns the score of a prepared prefix and the end."""
        return 0.0 if self._scores is None else self.total(prefix) + float(self._next[prefix][-1])
