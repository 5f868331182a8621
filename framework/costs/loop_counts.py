"""Finds the number of iterations of a loop in a traced graph, by running only its counters.

`tf.while_loop` without `maximum_iterations` does not say how long a loop is. But most loops count
integers up or down to a constant, or to the size of a tensor. These integers are evaluated through
the condition and the body; other values of the loop are ignored. The loop of a gradient has as many
iterations as the one before it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.costs import op_kinds
from tekso.framework.costs.graph_walks import function_graph

_TWO: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "AddV2": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Less": operator.lt,
    "LessEqual": operator.le,
    "Greater": operator.gt,
    "GreaterEqual": operator.ge,
    "LogicalAnd": operator.and_,
    "LogicalOr": operator.or_,
    "FloorDiv": operator.floordiv,
    "Maximum": max,
    "Minimum": min,
}
"""Ops of two integers, or of two conditions."""

_LONGEST = 100_000  # iterations that are evaluated


class Counted(NamedTuple):
    """A loop after its last iteration: the number of iterations, and its counters."""

    length: int
    state: tuple[int | None, ...]


def counted_iterations(loop: Any) -> int | None:
    """Returns the number of iterations of a loop; None if other values decide, or above 100,000."""
    found = _counted(loop)
    return None if found is None else found.length


@functools.lru_cache(maxsize=64)
def _counted(loop: Any) -> Counted | None:
    condition, body = (function_graph(loop, loop.get_attr(name)) for name in ("cond", "body"))
    if condition is None or body is None:  # of a program that was not traced here
        return None
    return run_counters(condition, body, [_scalar(_value(tensor, {})) for tensor in loop.inputs])


def run_counters(condition: Any, body: Any, state: Sequence[int | None]) -> Counted | None:
    """Returns a loop after its last iteration; None if other values decide, or above 100,000.

    Args:
      condition: graph of the condition.
      body: graph of the body; an output may be None, whose values are not known.
      state: the integers with which the loop starts; None: not known.
    """
    for length in range(_LONGEST):
        continues = _scalar(_value(condition.outputs[0], _given(condition, state)))
        if continues is None:
            return None
        if not continues:
            return Counted(length, tuple(state))
        given = _given(body, state)
        state = [None if x is None else _scalar(_value(x, given)) for x in body.outputs]
    return None


def _given(graph: Any, state: Sequence[int | None]) -> dict[str, Any]:
    return dict(zip((tensor.name for tensor in graph.inputs), state, strict=False))


def _scalar(value: Any) -> int | None:
    return None if value is None or np.ndim(value) else int(value)


def _value(tensor: Any, known: dict[str, Any]) -> Any:
    """Returns an integer, a condition or an array of integers; None if it is not known.

    Args:
      tensor: the tensor.
      known: {name of a tensor: its value or None}; values that are found are added.
    """
    if tensor.name not in known:
        known[tensor.name] = None
        if tensor.dtype.is_integer or tensor.dtype.is_bool:
            static = tf.get_static_value(tensor)
            known[tensor.name] = _computed(tensor, known) if static is None else static
    return known[tensor.name]


def _computed(tensor: Any, known: dict[str, Any]) -> Any:
    op = tensor.op
    if op.type in op_kinds.LOOPS:
        found = _counted(op)
        return None if found is None else found.state[tensor.value_index]
    if op.type in op_kinds.SAME_MEMORY or op.type == "Cast":
        return _value(op.inputs[tensor.value_index], known)
    if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") == 1:
        whole, begin = (_value(one, known) for one in op.inputs[:2])
        return whole[begin[0]] if np.ndim(whole) == 1 and np.size(begin) == 1 else None
    if op.type in _TWO:
        left, right = (_scalar(_value(one, known)) for one in op.inputs)
        return None if left is None or right is None else _TWO[op.type](left, right)
    return None
