"""Runs a function that computes the same twice; prints the bytes that it holds beside its inputs.

Started by a test in a process of its own: TensorFlow's allocator gives an array a free piece of up
to twice its bytes, and counts all of them, so what ran before would change the figure. The last
line is JSON: the bytes that are planned, and those that TensorFlow counts in each of several runs.
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tekso.framework.costs.graph_memory import peak_bytes


@tf.function(autograph=False)
def computed(x: tf.Tensor, y: tf.Tensor) -> Any:
    """As in the gradient of batch normalization, which subtracts the mean twice."""
    product = tf.matmul(x, x)
    first, again = product - y, tf.identity(product) - y
    total = tf.reduce_sum(tf.matmul(product, product))
    results = (first * total, again * (total + 1.0), product * total)
    return [tf.reduce_sum(result) for result in results]


def main() -> None:
    x, y = tf.ones([512, 512]), tf.ones([512, 512])
    computed(x, y)
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    measured = []
    for _ in range(9):
        tf.config.experimental.reset_memory_stats("CPU:0")
        computed(x, y)
        measured.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    planned = peak_bytes(computed.get_concrete_function(x, y).graph)
    print(json.dumps({"planned": planned, "measured": measured}))


if __name__ == "__main__":
    main()
