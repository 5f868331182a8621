"""Calls of functions that a program has traced before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def call_traced(program: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """Returns the result of `program.call`, after `program.trace` has traced the function.

    Raises:
      ValueError: the function was traced twice, or its result has another form than announced.
    """
    traces = 0

    def counting(*arguments: Any) -> Any:
        nonlocal traces
        traces += 1
        return function(*arguments)

    announced = program.trace(counting, *inputs)
    found = program.call(counting, *inputs)
    if traces != 1:
        raise ValueError(f"traced {traces} times")
    for spec, value in zip(tf.nest.flatten(announced), tf.nest.flatten(found), strict=True):
        if spec is not None and not spec.is_compatible_with(value):
            raise ValueError(f"announced {spec}, but it is {value}")
    return found
