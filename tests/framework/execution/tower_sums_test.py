"""Sums over towers: values and gradients of the whole batch, and errors instead of a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.tower_sums import in_turns, sum_over_towers

PARTS = ([1.0, 2.0], [3.0, 5.0])


def traced(tower: Callable[[int], Any], *, count: int = 2) -> Any:
    """Returns the results of towers that one function computes."""
    found = tf.function(lambda: in_turns(count, tower), autograph=False)()
    return [[x.numpy().tolist() for x in results] for results in found]


def test_towers_get_the_sums_and_gradients_of_the_whole_batch() -> None:
    """The loss is the sum of (x - mean)**3, where every tower has its own x."""

    def tower(number: int) -> Any:
        x = tf.constant(PARTS[number])
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = sum_over_towers(tf.reduce_sum(x)) / 4
            loss = tf.reduce_sum((x - mean) ** 3)
        return [mean, sum_over_towers(loss), tape.gradient(loss, x)]

    (mean, loss, first), (_, _, second) = traced(tower)
    whole = tf.constant([*PARTS[0], *PARTS[1]])
    with tf.GradientTape() as tape:
        tape.watch(whole)
        expected = tf.reduce_sum((whole - tf.reduce_mean(whole)) ** 3)
    assert (mean, loss) == (2.75, pytest.approx(float(expected)))
    assert first + second == pytest.approx(tape.gradient(expected, whole).numpy().tolist())


def test_outside_of_towers_a_sum_is_the_value_itself() -> None:
    assert sum_over_towers(tf.constant(3.0)).numpy() == 3.0


def in_a_loop(number: int) -> Any:
    def body(i: tf.Tensor, x: tf.Tensor) -> Any:
        return i + 1, sum_over_towers(x)

    return tf.while_loop(lambda i, _: i < 2, body, (tf.constant(0), tf.constant(1.0)))


def in_one_of_them(number: int) -> Any:
    return [sum_over_towers(tf.constant(1.0)) if number else tf.constant(1.0)]


@pytest.mark.parametrize("tower", [in_a_loop, in_one_of_them])
def test_sums_that_cannot_meet_are_an_error(tower: Callable[[int], Any]) -> None:
    with pytest.raises(ExecutionError, match=r"set execution\.towers=1"):
        traced(tower)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_tower_ends_all_of_them(failing: int) -> None:
    ended = []

    def tower(number: int) -> Any:
        try:
            if number == failing:
                raise ValueError("the error of a layer")
            return [sum_over_towers(tf.constant(1.0))]
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match="the error of a layer"):
        traced(tower)
    assert failing in ended
    assert len(ended) == 1 + failing  # tower 1 does not begin after an error of tower 0
