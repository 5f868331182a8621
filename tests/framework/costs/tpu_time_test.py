"""The time of a graph on a TPU: products or memory, with whole tiles of 128 channels."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.tpu_time import tpu_seconds

DEVICE = DeviceType("made", {"bfloat16": 2e3}, 1e9, 1e6, 1e9, reached=0.5)


@pytest.mark.parametrize(
    ("channels", "flops"),
    [(128, 2 * 20 * 9 * 128 * 128), (96, 2 * 20 * 9 * 128 * 128), (130, 2 * 20 * 9 * 256 * 128)],
)
def test_a_convolution_takes_the_time_of_its_whole_tiles(channels: int, flops: float) -> None:
    with tf.Graph().as_default() as graph:
        x = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[1, 4, 5, channels])
        w = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[3, 3, channels, 70])
        tf.nn.conv2d(x, w, 1, "SAME")
    assert tpu_seconds(graph, DEVICE) == pytest.approx(flops / 1e3)


def test_an_elementwise_op_takes_the_time_of_its_memory() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[1, 4, 5, 64])
        tf.identity(tf.nn.relu(x))
    assert tpu_seconds(graph, DEVICE) == pytest.approx(2 * 2 * 20 * 128 / 1e6)
