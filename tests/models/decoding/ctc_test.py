"""CTC decoding against sums over all paths."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tekso.models.decoding.ctc import (
    ctc_alignment,
    ctc_beam_search,
    ctc_greedy,
    merge_path,
)

BLANK = 1


def random_log_probs(seed: int, frames: int = 5) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 1.5, (frames, 3))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def all_labellings(log_probs: np.ndarray) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(3), repeat=len(log_probs)):
        labels = tuple(t for t, _ in itertools.groupby(path) if t != BLANK)
        probability = math.exp(sum(log_probs[i, token] for i, token in enumerate(path)))
        found[labels] = found.get(labels, 0.0) + probability
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_with_all_prefixes_is_exact(seed: int) -> None:
    log_probs = random_log_probs(seed)
    expected = all_labellings(log_probs)
    found = ctc_beam_search(log_probs, blank_id=BLANK, beam_size=1000)
    assert {h.labels for h in found} == set(expected)
    for hypothesis in found:
        assert math.exp(hypothesis.log_prob) == pytest.approx(expected[hypothesis.labels])
    assert [h.log_prob for h in found] == sorted((h.log_prob for h in found), reverse=True)


def test_the_best_labelling_is_not_always_that_of_the_best_path() -> None:
    log_probs = np.log([[0.4, 0.6, 1e-9], [0.4, 0.6, 1e-9]])
    assert ctc_greedy(log_probs, blank_id=BLANK) == []
    best = ctc_beam_search(log_probs, blank_id=BLANK, beam_size=2)[0]
    assert best.labels == (0,) and math.exp(best.log_prob) == pytest.approx(0.64, rel=1e-6)


def test_a_small_beam_keeps_the_best_prefixes() -> None:
    log_probs = random_log_probs(5, frames=6)
    few = ctc_beam_search(log_probs, blank_id=BLANK, beam_size=4, tokens_per_frame=1)
    exact = all_labellings(log_probs)
    assert len(few) <= 4
    assert all(math.exp(h.log_prob) <= exact[h.labels] + 1e-12 for h in few)


def test_merges_repeated_tokens_unless_a_blank_is_between_them() -> None:
    assert merge_path([0, 0, BLANK, 0, 2, 2, BLANK], blank_id=BLANK) == [0, 0, 2]
    assert merge_path([], blank_id=BLANK) == []
    assert ctc_greedy(np.zeros([0, 3]), blank_id=BLANK) == []
    assert ctc_beam_search(np.zeros([0, 3]), blank_id=BLANK, beam_size=2)[0].labels == ()


def test_rejects_an_empty_beam() -> None:
    with pytest.raises(ValueError, match="beam_size 0"):
        ctc_beam_search(np.zeros([1, 3]), blank_id=BLANK, beam_size=0)


def begins_of(path: tuple[int, ...]) -> list[int]:
    return [t for t, v in enumerate(path) if v != BLANK and (t == 0 or path[t - 1] != v)]


@pytest.mark.parametrize("labels", [[0, 2], [0, 0], [2, 0, 2], [], [0, 0, 0], [0, 2, 0, 2, 0, 2]])
def test_the_alignment_is_that_of_the_most_probable_path(labels: list[int]) -> None:
    log_probs = random_log_probs(7)
    paths = [
        (sum(log_probs[t, token] for t, token in enumerate(path)), begins_of(path))
        for path in itertools.product(range(3), repeat=len(log_probs))
        if merge_path(path, blank_id=BLANK) == labels
    ]
    expected = max(paths)[1] if paths else None
    assert ctc_alignment(log_probs, labels, blank_id=BLANK) == expected
    assert ctc_alignment(log_probs[:0], labels, blank_id=BLANK) == (None if labels else [])
