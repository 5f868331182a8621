"""CTC prefix scores against sums over all paths, and their use in a beam search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tekso.models.decoding.ctc import merge_path
from tekso.models.decoding.ctc_prefix import CtcFrames, Prefixes
from tekso.models.decoding.decoder import repeat_rows, take_rows

RNG = np.random.default_rng(4)
LABELS, BLANK = 2, 2
LOGITS = 2.0 * RNG.standard_normal([2, 5, LABELS + 1])
LENGTHS = [5, 3]


def probabilities(row: int) -> dict[tuple[int, ...], float]:
    """Returns the probability of every labelling, summed over all paths."""
    x = LOGITS[row, : LENGTHS[row]]
    p = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(LABELS + 1), repeat=len(p)):
        labels = tuple(merge_path(path, blank_id=BLANK))
        found[labels] = found.get(labels, 0.0) + float(np.prod(p[range(len(p)), path]))
    return found


def frames() -> CtcFrames:
    mask = tf.sequence_mask(LENGTHS, 5)
    return CtcFrames.of_logits(tf.constant(LOGITS, tf.float32), mask, BLANK)


def test_scores_are_the_logs_of_ratios_of_sums_over_all_paths() -> None:
    """For all prefixes of up to 3 labels, all hypotheses of a source side by side."""
    totals = [probabilities(0), probabilities(1)]
    known = frames()
    texts = list(itertools.product(range(LABELS), repeat=3))
    state = Prefixes(*repeat_rows(tuple(known.begin()), len(texts)))
    for size in range(4):
        scores = known.next_scores(state).numpy().reshape(2, len(texts), LABELS + 1)
        for row, all_of in enumerate(totals):
            for k, text in enumerate(texts):
                prefix = text[:size]
                begins = [p for labels, p in all_of.items() if labels[:size] == prefix]
                if not sum(begins):
                    continue
                for c in range(LABELS):
                    longer = (*prefix, c)
                    total = sum(p for one, p in all_of.items() if one[: size + 1] == longer)
                    if total:
                        wanted = np.log(total / sum(begins))
                        assert scores[row, k, c] == pytest.approx(wanted, abs=1e-4)
                    else:
                        assert scores[row, k, c] < -30
                if prefix in all_of:
                    wanted = np.log(all_of[prefix] / sum(begins))
                    assert scores[row, k, LABELS] == pytest.approx(wanted, abs=1e-4)
                else:
                    assert scores[row, k, LABELS] < -30
        if size < 3:
            ids = tf.constant([text[size] for text in texts] * 2, tf.int32)
            state = known.extended(state, ids)


def test_prefixes_are_those_of_the_rows_that_were_selected() -> None:
    known = frames()
    state = Prefixes(*repeat_rows(tuple(known.begin()), 2))
    both = known.extended(state, tf.constant([0, 1, 0, 1]))
    swapped = Prefixes(*take_rows(tuple(both), tf.constant([1, 0, 3, 3])))
    wanted = known.next_scores(both).numpy()[[1, 0, 3, 3]]
    np.testing.assert_allclose(known.next_scores(swapped), wanted, atol=1e-6)


def test_long_utterances_with_certain_frames_stay_finite() -> None:
    """1,000 frames whose tokens have a logit of 60: a wrong label has a probability of e^-60."""
    path = np.repeat([0, BLANK, 1, BLANK], 250)
    logits = tf.constant(60.0 * np.eye(LABELS + 1)[path][None], tf.float32)
    known = CtcFrames.of_logits(logits, tf.ones([1, 1000], tf.bool), BLANK)
    state, total = known.begin(), 0.0
    for token in (0, 1, LABELS):
        scores = known.next_scores(state)[0]
        assert np.isfinite(scores).all() and int(tf.argmax(scores)) == token
        total += float(scores[token])
        state = known.extended(state, tf.constant([min(token, LABELS - 1)]))
    assert total == pytest.approx(0.0, abs=1e-3)


def test_the_blank_must_be_the_last_token() -> None:
    with pytest.raises(ValueError, match="the blank is token 0, must be 2"):
        CtcFrames.of_logits(tf.zeros([1, 2, 3]), tf.ones([1, 2], tf.bool), 0)
