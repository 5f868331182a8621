"""CIDEr-D against the formula on dense vectors, and values that follow from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tekso.tasks.captioning.cider import cider, words_of

REFERENCES = [
    ["a red bird on a branch", "the red bird sits on a branch", "bird"],
    ["two dogs run on the grass near a red ball"],
    ["a dog and a dog and a dog", "dogs"],
]
CAPTIONS = ["a red bird on the branch", "a dog runs on the grass", "a dog and a dog"]


def dense(captions: list[str], references: list[list[str]]) -> list[float]:
    """Returns CIDEr-D by vectors over all n-grams."""

    def grams(text: str, n: int) -> list[str]:
        words = text.split()
        return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]

    total = np.zeros(len(captions))
    for n in (1, 2, 3, 4):
        texts = [*captions, *(text for own in references for text in own)]
        known = sorted({gram for text in texts for gram in grams(text, n)})

        def counts(text: str, n: int = n, known: list[str] = known) -> np.ndarray:
            return np.array([grams(text, n).count(gram) for gram in known], np.float64)

        images = sum(np.max([counts(t) > 0 for t in own], axis=0).astype(int) for own in references)
        idf = np.log(len(references)) - np.log(np.maximum(images, 1))
        for i, (caption, own) in enumerate(zip(captions, references, strict=True)):
            c = counts(caption) * idf
            for reference in own:
                r = counts(reference) * idf
                apart = len(caption.split()) - len(reference.split())
                norm = np.linalg.norm(c) * np.linalg.norm(r)
                similarity = np.minimum(c, r) @ r / norm if norm else 0.0
                total[i] += 10 / 4 / len(own) * similarity * math.exp(-(apart**2) / 72)
    return total.tolist()


def test_scores_are_those_of_the_formula() -> None:
    found = cider(CAPTIONS, REFERENCES)
    np.testing.assert_allclose(found, dense(CAPTIONS, REFERENCES), rtol=1e-12)
    assert min(found) > 0.1
    assert len(set(found)) == 3


def test_a_caption_that_is_its_only_reference_has_10_and_one_without_its_words_0() -> None:
    references = [["a red bird sits"], ["two dogs run fast"]]
    assert cider(["A red bird sits.", "cats"], references) == pytest.approx([10.0, 0.0])


def test_repeated_words_are_clipped() -> None:
    """The plain cosine is not clipped, so repeating a rare word would not lower it as much."""
    references = [["a bird sits here"], ["two dogs run fast"]]
    once, often = cider(["bird", "x"], references)[0], cider(["bird bird bird", "x"], references)[0]
    lengths = math.exp(-9 / 72), math.exp(-1 / 72)
    assert once / lengths[0] == pytest.approx(10 / 4 * 1 / 2)  # 4 words of equal weights
    assert often / lengths[1] == pytest.approx(10 / 4 * 1 / (3 * 2))


def test_words_have_lower_case_and_no_punctuation() -> None:
    assert words_of("A man's dog, (it) runs!") == ["a", "mans", "dog", "it", "runs"]


def test_numbers_of_captions_and_references_must_agree() -> None:
    with pytest.raises(ValueError, match="1 captions and 2 lists of references"):
        cider(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="no list empty"):
        cider(["a"], [[]])
