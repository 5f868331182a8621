"""TensorFlow's warning about retracing, for several programs and for one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import small_tasks
import tensorflow as tf

from tekso.framework.execution import DataParallel
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.workarounds.call_counts import counted_alone
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant


class Program:
    """Has a tf.function of a method, and one of an inner function."""

    def __init__(self, wrapped: Callable[[Any], Any]) -> None:
        def run(x: tf.Tensor) -> tf.Tensor:
            return x + 1.0

        self.step = wrapped(tf.function(self._step, autograph=False))
        self.call = wrapped(tf.function(run, autograph=False))

    def _step(self, x: tf.Tensor) -> tf.Tensor:
        return 2.0 * x


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    logger, level = tf.get_logger(), tf.get_logger().level
    logger.setLevel(logging.WARNING)
    logger.addHandler(caplog.handler)
    yield lambda: sum("retracing" in record.getMessage() for record in caplog.records)
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)


def run_several(wrapped: Callable[[Any], Any]) -> None:
    for _ in range(6):
        program = Program(wrapped)
        for _ in range(2):
            program.step(tf.ones([2]))
            program.call(tf.ones([2]))


def test_tensorflow_counts_the_traces_of_several_functions_together(
    warnings: Callable[[], int],
) -> None:
    run_several(lambda function: function)
    assert warnings() > 0


def test_functions_of_several_programs_are_counted_each_for_itself(
    warnings: Callable[[], int],
) -> None:
    run_several(counted_alone)
    assert warnings() == 0


def test_a_function_that_is_traced_again_and_again_is_still_reported(
    warnings: Callable[[], int],
) -> None:
    program = Program(counted_alone)
    for size in range(1, 8):
        program.step(tf.ones([size]))
    assert warnings() > 0


def test_programs_of_an_execution_count_the_traces_each_for_itself(
    warnings: Callable[[], int],
) -> None:
    task = small_tasks.classifier(3).instantiate()
    batch = small_tasks.Flowers.Params(batch_size=6).instantiate().batch(0)
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    execution = DataParallel.Params(towers=1, xla="none").instantiate()
    for _ in range(5):
        program = execution.build(task, learner.instantiate(), seed=2, batch=signature_of(batch))
        program.initialize()
        program.train_step(batch, 0)
    assert warnings() == 0
