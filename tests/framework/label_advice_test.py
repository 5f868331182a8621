"""A label that is no class: the message says whether an array of the batch has it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.error_advice import LabelError, naming_labels

BATCH = {"x": np.zeros([2, 3], np.float32), "labels": np.array([1, 5])}


def losses(labels: list[int]) -> None:
    tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(labels), tf.zeros([2, 4]))


def test_a_label_of_the_batch_is_one_of_its_array() -> None:
    what = r"^'labels' \(example 1 of input.batch\(3\)\) has the label 5, but .*Correct the input"
    with pytest.raises(LabelError, match=what), naming_labels(BATCH, "input.batch(3)"):
        losses([1, 5])


def test_a_label_that_the_task_computes_is_not_one_of_the_data() -> None:
    what = (
        r"^the task computes the label 7, but the loss has 4 classes: labels are 0 to 3\. No array "
        r'.* place of an example .*"Compare the examples of all devices" in docs/own_model\.md'
    )
    with (
        pytest.raises(LabelError, match=what) as error,
        naming_labels(BATCH, "input.batch(3)"),
        naming_labels(BATCH),
    ):
        losses([6, 7])
    assert "Correct the input" not in str(error.value)
