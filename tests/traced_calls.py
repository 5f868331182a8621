"""Calls of functions that a program has traced before, and of functions that nothing traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def op_by_op() -> Iterator[None]:
    """Computes functions op by op in a block: a reference on one device, in a few steps.

    That takes less time than tracing, and shares no graph with what is compared with it.
    """
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def call_traced(program: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """Returns the result of `program.call`, after `program.trace` has traced the function.

    In a block of `op_by_op`, it is only called.

    Raises:
      ValueError: the function was traced twice, or its result has another form than announced.
    """
    if tf.config.functions_run_eagerly():
        return program.call(function, *inputs)
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
