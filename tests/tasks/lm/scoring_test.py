"""Scoring: windows, overlaps and totals, with a model whose log-probabilities are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.tasks.lm.scoring import TextScorer


class EagerProgram:
    """Calls without weights."""

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        return function(Theta(), *inputs, StepContext(mode="decode"))


def context_lengths(theta: Theta, ids: tf.Tensor, labels: tf.Tensor, ctx: Any) -> tf.Tensor:
    """A "log-probability" that shows the label and how many tokens of context it had."""
    length = tf.range(1, ids.shape[1] + 1, dtype=tf.float32)
    return -(tf.cast(labels, tf.float32) * 1000 + length)


@pytest.mark.parametrize("num_tokens", [2, 3, 5, 6, 7, 8, 9, 13, 14, 40])
@pytest.mark.parametrize("overlap", [0, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_but_the_first_is_scored_once(
    num_tokens: int, overlap: int, batch_size: int
) -> None:
    scorer = TextScorer(context_lengths, window=5, overlap=overlap, batch_size=batch_size)
    ids = np.arange(10, 10 + num_tokens)
    score = scorer.score(EagerProgram(), ids, num_bytes=3)
    labels, context = np.divmod(-score.log_probs, 1000)
    np.testing.assert_array_equal(labels, ids[1:])
    want = [min(i + 1, 5) if i < 5 else overlap + 1 + (i - 5) % (5 - overlap)
            for i in range(num_tokens - 1)]  # fmt: skip
    np.testing.assert_array_equal(context, want)


def test_totals_are_sums_over_the_scored_tokens() -> None:
    def half(theta: Theta, ids: tf.Tensor, labels: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tf.fill(ids.shape, math.log(0.5))

    score = TextScorer(half, window=4).score(EagerProgram(), range(11), num_bytes=20)
    assert score.total == pytest.approx(10 * math.log(0.5), rel=1e-6)
    assert score.loss == pytest.approx(math.log(2), rel=1e-6)
    assert score.bits_per_byte == pytest.approx(0.5, rel=1e-6)  # 10 tokens of one bit, 20 bytes


def test_a_text_without_a_second_token_is_refused() -> None:
    with pytest.raises(ValueError, match="a text of 1 tokens"):
        TextScorer(context_lengths, window=5).score(EagerProgram(), [4], num_bytes=0)


def test_an_overlap_of_a_whole_window_is_refused() -> None:
    with pytest.raises(ValueError, match="windows of 5 tokens that overlap by 5"):
        TextScorer(context_lengths, window=5, overlap=5)
