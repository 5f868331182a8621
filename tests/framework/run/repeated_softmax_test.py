"""RepeatedSoftmax: which scores of a softmax cross-entropy are taken for probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.run.repeated_softmax import RepeatedSoftmax

SCORES = np.random.default_rng(0).normal(size=(7, 3))


def is_found(scores: tf.Tensor) -> bool:
    softmax = RepeatedSoftmax()
    with softmax.watching():
        tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros([len(scores)], tf.int32), scores)
    return softmax.found


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_probabilities_of_every_dtype_are_found(dtype: str) -> None:
    assert is_found(tf.cast(tf.nn.softmax(SCORES), dtype))


def test_scores_of_which_one_row_is_no_distribution_are_not_probabilities() -> None:
    rows = tf.nn.softmax(SCORES).numpy()
    rows[4, 1] += 0.01
    assert not is_found(tf.constant(rows))
    assert not is_found(tf.constant([[-0.5, 1.5], [0.5, 0.5]]))
    assert not is_found(tf.ones([3, 1]))  # of one class


def test_ops_after_the_block_are_not_seen() -> None:
    softmax = RepeatedSoftmax()
    with softmax.watching():
        pass
    scores = tf.nn.softmax(SCORES)
    tf.nn.softmax_cross_entropy_with_logits(tf.zeros_like(scores), scores)
    assert not softmax.found
