"""CIDEr-D: similarity of captions to their references, by weighted n-grams.

    g_n(c)[w]   count of the n-gram w in c, times log(images / images with w in a reference)
    sim_n(c, r) = exp(-(|c| - |r|)² / 2σ²) · Σ_w min(g_n(c), g_n(r)) g_n(r) / (‖g_n(c)‖ ‖g_n(r)‖)
    CIDEr-D     = 10 · mean over the references r, and over n = 1 … 4, of sim_n(c, r)

|c| is the number of words. The counts are not divided by the length of the caption, as in the code
of the authors, on which published figures rest.

Source: Vedantam et al. 2015, "CIDEr: Consensus-based image description evaluation", equations 2 and
4, and section 6 (CIDEr-D).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import string
from collections.abc import Sequence

_LONGEST, _SIGMA, _SCALE = 4, 6.0, 10.0
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

Counts = list[collections.Counter[tuple[str, ...]]]
"""For n = 1 … 4, the count of every n-gram."""


@dataclasses.dataclass(frozen=True)
class Vectors:
    """The weighted n-grams of a text.

    Attributes:
      weights: for n = 1 … 4, {n-gram: weight}.
      norms: Euclidean norm of each of them.
      length: number of words.
    """

    weights: list[dict[tuple[str, ...], float]]
    norms: list[float]
    length: int


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without ASCII punctuation."""
    return text.lower().translate(_NO_PUNCTUATION).split()


def cider(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Returns CIDEr-D of every caption, from 0 to 10.

    The numbers of images with an n-gram are counted in the references. With one image, all weights
    are 0, so the score is 0.

    Args:
      hypotheses: a caption for each image.
      references: the references of each image, at least one.

    Raises:
      ValueError: the numbers differ, or an image has no reference.
    """
    if len(hypotheses) != len(references) or not all(references):
        raise ValueError(
            f"{len(hypotheses)} captions and {len(references)} lists of references: the numbers "
            "must be equal, and no list empty"
        )
    counted = [[_counts(words_of(text)) for text in own] for own in references]
    images: collections.Counter[tuple[str, ...]] = collections.Counter()
    for own in counted:
        images.update({gram for one in own for grams in one for gram in grams})
    log_images = math.log(max(len(references), 1))

    def vectors(counts: Counts) -> Vectors:
        weights = [
            {g: n * (log_images - math.log(max(images[g], 1))) for g, n in grams.items()}
            for grams in counts
        ]
        norms = [math.sqrt(sum(w * w for w in own.values())) for own in weights]
        return Vectors(weights, norms, sum(counts[0].values()))

    scores = []
    for text, own in zip(hypotheses, counted, strict=True):
        found = vectors(_counts(words_of(text)))
        similar = [_similarity(found, vectors(one)) for one in own]
        scores.append(_SCALE * sum(similar) / len(similar))
    return scores


def _counts(words: list[str]) -> Counts:
    return [
        collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        for n in range(1, _LONGEST + 1)
    ]


def _similarity(one: Vectors, reference: Vectors) -> float:
    total = 0.0
    for own, other, *norms in zip(
        one.weights, reference.weights, one.norms, reference.norms, strict=True
    ):
        if all(norms):
            product = sum(min(w, other[g]) * other[g] for g, w in own.items() if g in other)
            total += product / (norms[0] * norms[1])
    apart = one.length - reference.length
    return total / _LONGEST * math.exp(-(apart**2) / (2 * _SIGMA**2))
