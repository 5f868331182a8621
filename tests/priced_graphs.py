"""Speeds of a machine, and graphs of small functions whose time follows from them by hand."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.costs.this_machine import MachineSpeed

POINTS = [(1.0, 1e9), (3.0, 3e9)]
SLOWER = [(1.0, 5e8), (3.0, 1e9)]
STREAMS = [(20000.0, 1e8), (40000.0, 5e7)]  # from a cache, and from memory
LOOPS = [(1.0, 4e9)]  # products in a compiled loop
SPEED = MachineSpeed(
    POINTS, SLOWER, POINTS, POINTS, POINTS, POINTS, STREAMS, 1e6, {}, 2e6,
    [(1.0, 1e7)], [(1.0, 1e6)], [(1.0, 1e5)], 1e5, 1e5, 1e5,
    STREAMS, 1e9, 1e6, {}, 1e7,
    1e5, LOOPS, LOOPS, POINTS, 1.0, 0.25, 0.5, 2.0, 3.0, 0.0, 0.0,
)  # fmt: skip
"""Speeds of which every time of a test is a multiple that shows where it comes from."""


def graph(function: Any, *shapes: list[int]) -> Any:
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return tf.function(function, autograph=False).get_concrete_function(*specs).graph
