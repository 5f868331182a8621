"""The choice between two tensors of the same shape by one condition."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.weight_update import select


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("shape", [[], [5], [2, 3], [2, 1, 3]])
@pytest.mark.parametrize("of_condition", [[], [1]])
def test_the_other_tensor_leaves_no_trace(
    of_condition: list[int], shape: list[int], is_compiled: bool
) -> None:
    number = np.full(shape, 3.0, np.float32)
    chosen = tf.function(select, jit_compile=is_compiled, autograph=False)
    for other in (np.nan, np.inf, 7.0):
        rest = np.full(shape, other, np.float32)
        yes, no = (tf.constant(one, tf.bool, of_condition) for one in (True, False))
        np.testing.assert_array_equal(chosen(yes, number, rest), number)
        np.testing.assert_array_equal(chosen(no, rest, number), number)
