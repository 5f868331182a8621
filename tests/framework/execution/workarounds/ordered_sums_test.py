"""Sums of several tensors with --deterministic have one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

from tekso.framework.execution import devices


@pytest.fixture
def deterministic() -> Iterator[None]:
    devices.set_determinism(True)
    yield
    devices.set_determinism(False)


def of_add_n(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return tf.add_n([x, y, z])


def of_additions(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    return (x + y) + z


def of_gradients(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """The tape adds the gradients of the last use first."""
    a = tf.ones_like(x)
    with tf.GradientTape() as tape:
        tape.watch(a)
        uses = [tf.identity(a) * w for w in (z, y, x)]
    return tape.gradient(uses, a)


def computed(total: Callable[..., tf.Tensor]) -> list[float]:
    """Adds 1e8, -1e8 and 1; only the memory of the last one is free."""

    @tf.function(autograph=False)
    def run(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor, one: tf.Tensor) -> tf.Tensor:
        return total(x, y, tf.exp(z * one))

    values = tf.fill([3], 1e8), tf.fill([3], -1e8), tf.fill([3], 0.0), tf.ones([3])
    found: list[float] = run(*values).numpy().tolist()
    return found


SUMS = [of_add_n, of_additions, of_gradients]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("total", SUMS)
def test_a_sum_goes_from_first_to_last(total: Callable[..., tf.Tensor]) -> None:
    assert computed(total) == [1.0] * 3


@pytest.mark.parametrize("total", SUMS)
def test_tensorflow_alone_begins_with_the_memory_that_is_free(
    total: Callable[..., tf.Tensor],
) -> None:
    devices.set_determinism(True)
    devices.set_determinism(False)
    assert computed(total) == [0.0] * 3
