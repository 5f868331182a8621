"""scan and rematerialize take NumPy arrays and numbers, and give layers tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.run.trial_context import OpByOp, OpCount
from tekso.framework.theta import Theta


class State(NamedTuple):
    total: Any
    steps: Any


def body(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
    assert all(map(tf.is_tensor, (state.total, state.steps, x["a"], x["b"])))
    total = state.total + x["a"] * tf.cast(x["b"], tf.float32)
    return State(total, state.steps + 1), total


def eager(run: Callable[[], Any]) -> Any:
    return run()


def graph(run: Callable[[], Any]) -> Any:
    return tf.function(run, autograph=False)()


CONTEXTS = {
    "plain": lambda: StepContext(mode="eval"),
    "trial": lambda: OpByOp(mode="eval", count=OpCount(), read=set()),
}


@pytest.mark.parametrize("how", [eager, graph])
@pytest.mark.parametrize("ctx", CONTEXTS)
@pytest.mark.parametrize("total", [0.0, np.float32(0.0), np.zeros([], np.float32), tf.zeros([])])
def test_scan_takes_arrays_and_numbers(how: Any, ctx: str, total: Any) -> None:
    a, b = np.arange(3, dtype=np.float32), [1, 2, 3]
    xs = {"a": a, "b": np.array(b)}
    found, ys = how(lambda: ops.scan(CONTEXTS[ctx](), body, Theta(), State(total, 0), xs))
    assert isinstance(found, State) and tf.is_tensor(found.total)
    assert (found.total.dtype, found.steps.dtype) == (tf.float32, tf.int32)
    np.testing.assert_array_equal(ys, [0, 2, 8])
    assert (float(found.total), int(found.steps)) == (8, 3)


@pytest.mark.parametrize("how", [eager, graph])
def test_a_body_may_return_arrays_and_numbers(how: Any) -> None:
    def run() -> Any:
        return ops.scan(
            StepContext(), lambda *_: (1.0, np.ones([2])), Theta(), 0.0, np.zeros([3, 1])
        )

    state, ys = how(run)
    assert float(state) == 1 and ys.shape == [3, 2] and ys.dtype == tf.float64


@pytest.mark.parametrize("how", [eager, graph])
def test_rematerialize_takes_arrays_and_numbers(how: Any) -> None:
    def function(theta: Theta, x: Any, scale: Any, none: Any, ctx: StepContext) -> Any:
        assert tf.is_tensor(x) and tf.is_tensor(scale) and none is None
        return x * scale

    x = np.arange(3, dtype=np.float32)
    found = how(lambda: ops.rematerialize(StepContext(), function, Theta(), x, 2.0, None))
    np.testing.assert_array_equal(found, [0, 2, 4])


@pytest.mark.parametrize("xs", [{"a": np.ones([2, 3]), "b": np.ones([3, 2])}, 1.0])
def test_arrays_of_unequal_iterations_are_refused(xs: Any) -> None:
    with pytest.raises(ValueError, match=r"same known leading dim"):
        ops.scan(StepContext(), body, Theta(), 0.0, xs)
