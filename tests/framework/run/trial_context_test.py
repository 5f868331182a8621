"""What a trial of a task notes while it computes."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tekso.framework.run.trial_context import OpCount


def test_a_trace_has_the_ops_of_a_loop_once() -> None:
    count, x = OpCount(), tf.constant(1.0)
    with count.counting():
        x = tf.negative(x)
        with count.loop(4):
            for _ in range(4):
                x = tf.negative(x)
                with count.loop(3):
                    for _ in range(3):
                        x = tf.negative(x)
    tf.negative(x)
    assert count.run == 1 + 4 * (1 + 3) and count.traced == pytest.approx(1 + 1 + 1)
