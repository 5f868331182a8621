"""The state that a program restores from a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.state import checked_state
from tekso.framework.initializers import Zeros
from tekso.framework.weight_spec import WeightSpec

WHOLE = (slice(0, 3),)


def test_values_are_read_in_the_dtype_of_the_state_and_copied_only_to_convert_them() -> None:
    spec = WeightSpec("w", (3,), (None,), Zeros.Params().instantiate(), "bfloat16")
    stored = {"weights/w": np.float32([1.0, -2.0, 1.001])}
    value = checked_state({"weights/w": spec}, stored.__getitem__, stored.keys())["weights/w"]
    part = value[WHOLE]
    assert value.shape == (3,) and part.dtype == tf.bfloat16
    np.testing.assert_array_equal(part.numpy().astype(np.float32), [1.0, -2.0, 1.0])
    same = {"weights/w": tf.constant([1.0, 2.0, 3.0], tf.bfloat16)}

    class Whole:
        shape = (3,)

        def __getitem__(self, where: tuple[slice, ...]) -> tf.Tensor:
            return same["weights/w"]

    read = checked_state({"weights/w": spec}, lambda key: Whole(), stored.keys())
    assert read["weights/w"][WHOLE] is same["weights/w"]


def test_weights_that_do_not_fit_are_named_before_slots() -> None:
    spec = WeightSpec("w", (3,), (None,), Zeros.Params().instantiate(), "float32")
    stored = {"learner/a/m": np.zeros(1), "weights/a": np.zeros(1), "weights/w": np.zeros(2)}
    with pytest.raises(ExecutionError) as caught:
        checked_state({"learner/w/m": spec, "weights/w": spec}, stored.__getitem__, stored.keys())
    assert str(caught.value) == (
        "the checkpoint does not fit the model and learner: unknown weights/a; "
        "weights/w is [2], must be [3]; missing learner/w/m; unknown learner/a/m"
    )
