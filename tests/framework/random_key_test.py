"""Tests of keys of random numbers that are computed when they are first needed, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.context import StepContext
from tekso.framework.random_key import RandomKey


class Named:
    """Has what `StepContext.uniform` reads of a layer."""

    path = pattern = "layer"


def ops_of(function: Any) -> list[str]:
    traced = tf.function(function, autograph=False)
    graph = traced.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    return [op.type for op in graph.get_operations()]


def test_a_context_that_draws_nothing_adds_no_ops() -> None:
    def step(number: tf.Tensor) -> tf.Tensor:
        ctx = StepContext(seed=3, step=number)
        for i in range(4):
            ctx = ctx.fold(i)
        return tf.identity(number)

    assert "BitwiseXor" not in ops_of(step)


def test_a_key_is_computed_once() -> None:
    def step(number: tf.Tensor) -> list[tf.Tensor]:
        ctx = StepContext(seed=3, step=number)
        return [ctx.random_key(Named(), name) for name in "ab"]

    def key(number: tf.Tensor) -> tf.Tensor:
        return counter_hash.root_key(3, number)

    def stream(number: tf.Tensor) -> tf.Tensor:
        return counter_hash.fold(key(number), 7)

    of_key, of_stream = (ops_of(f).count("BitwiseXor") for f in (key, stream))
    assert ops_of(step).count("BitwiseXor") == of_key + 2 * (of_stream - of_key)


@pytest.mark.parametrize("seed", [0, 2**63 + 5])
@pytest.mark.parametrize("is_graph", [False, True])
def test_a_key_first_used_in_a_loop_is_that_of_its_path_and_computed_outside(
    seed: int, is_graph: bool
) -> None:
    def drawn(number: tf.Tensor) -> tf.Tensor:
        outside = RandomKey.of_step(seed, number).fold(2)
        keys = tf.TensorArray(tf.uint32, 3)
        _, keys = tf.while_loop(
            lambda i, _: i < 3,
            lambda i, keys: (i + 1, keys.write(i, outside.fold(i).value())),
            (tf.constant(0), keys),
        )
        assert outside.value() is outside.value()  # also usable after the loop
        return tf.concat([keys.stack(), [outside.value()]], 0)

    function = tf.function(drawn, autograph=False) if is_graph else drawn
    key = counter_hash.fold(counter_hash.root_key(seed, 11), 2)
    expected = [*(int(counter_hash.fold(key, i)) for i in range(3)), int(key)]
    assert function(tf.constant(11, tf.int64)).numpy().tolist() == expected


def test_a_key_of_an_eager_context_is_usable_in_several_functions() -> None:
    ctx = StepContext(seed=3, step=5)
    functions = [tf.function(lambda: ctx.uniform(Named(), [2, 3]), autograph=False) for _ in "ab"]
    first, second = (function().numpy().tolist() for function in functions)
    assert first == second == ctx.uniform(Named(), [2, 3]).numpy().tolist()
