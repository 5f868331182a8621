"""The best tokens in two levels are those of one sort."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.models.decoding.top_tokens import top_tokens


@pytest.mark.parametrize("vocab", [5, 255, 512, 530])
@pytest.mark.parametrize("num_values", [3, 40, 10**6])
def test_equals_a_stable_sort(vocab: int, num_values: int) -> None:
    scores = np.random.default_rng(vocab).integers(0, num_values, [7, vocab]).astype(np.float32)
    scores[0] = -np.inf
    scores[1, : vocab // 2] = -np.inf
    count = min(4, vocab)
    found, ids = tf.function(top_tokens, autograph=False)(tf.constant(scores), count)
    want = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(found, np.take_along_axis(scores, want, 1))
