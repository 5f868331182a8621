"""Nearest-neighbour translation: the target of the training pair with the most similar source.

It is a baseline for regular data such as dates and units: it can only copy training targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

_LENGTH = 3  # characters of an n-gram
_EDGE = "\x02"  # marks the beginning and the end of a text
_BUCKETS = 1 << 20


class NearestSource:
    """Finds the training source with the highest cosine similarity of weighted character trigrams.

    The weight of a trigram is log(number of sources / number of sources that have it). If several
    sources are equally similar, the first is used.

    Source: Salton & Buckley 1988, "Term-weighting approaches in automatic text retrieval".
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Builds the index of (source, target) pairs.

        Raises:
          ValueError: there is no pair.
        """
        self._targets: list[str] = []
        keys: list[np.ndarray] = []
        for source, target in pairs:
            self._targets.append(target)
            keys.append(_pieces(source))
        if not keys:
            raise ValueError("there is no training pair to look up")
        sizes = np.array([len(own) for own in keys])
        flat = np.concatenate(keys)
        owners = np.repeat(np.arange(len(keys), dtype=np.int32), sizes)
        order = np.argsort(flat, kind="stable")
        self._owners = owners[order]
        counts = np.bincount(flat, minlength=_BUCKETS)
        self._ends = np.concatenate([[0], np.cumsum(counts)])
        self._weights = np.zeros(_BUCKETS)
        np.log(len(keys) / np.maximum(counts, 1), out=self._weights, where=counts > 0)
        squares = np.bincount(owners, np.square(self._weights[flat]), len(keys))
        self._norms = np.sqrt(np.maximum(squares, np.finfo(np.float64).tiny))

    def translate(self, sources: Iterable[str]) -> Iterator[str]:
        """Yields, for each text, the target of the nearest training source."""
        for source in sources:
            similarity = np.zeros(len(self._targets))
            for key in _pieces(source):
                owners = self._owners[self._ends[key] : self._ends[key + 1]]
                similarity[owners] += math.pow(self._weights[key], 2)
            yield self._targets[int(np.argmax(similarity / self._norms))]


def _pieces(text: str) -> np.ndarray:
    """Returns the distinct trigrams of a text, hashed to numbers."""
    codes = np.array([ord(c) for c in f"{_EDGE}{text}{_EDGE}"], np.uint64)
    key = np.zeros(max(len(codes) - _LENGTH + 1, 1), np.uint64)
    for i in range(_LENGTH):
        part = codes[i : i + len(key)]
        key[: len(part)] = (key[: len(part)] + part) * np.uint64(0x9E3779B97F4A7C15)
    return np.unique(key >> np.uint64(44)).astype(np.int64)
