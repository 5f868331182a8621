"""A `tf.while_loop` whose body may add a tensor from outside twice.

Defect of TensorFlow 2.21: its graph optimizer turns b + b into b times a constant. In the body of a
loop, if b is from outside, it puts the constant outside of the loop: nothing is computed, results
have the shape [0], and a mesh waits forever. (x w + b) + (h v + b) and two added calls of a Linear
become a sum of b + b and others. It does not happen if b is computed in the iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework.op_signatures import function_graph

_SUMS = ("Add", "AddV2", "AddN")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_UNCHANGED = (
    "EnsureShape",
    "Identity",
    "IdentityN",
    "PreventGradient",
    "Relayout",
    "RelayoutLike",
    "StopGradient",
)


def while_loop(
    proceeds: Callable[..., Any], body: Callable[..., Any], loop_vars: Any, **settings: Any
) -> Any:
    """Returns what `tf.while_loop(proceeds, body, loop_vars, **settings)` does.

    One of `loop_vars` must be of integers.
    """

    def iteration(*given: Any) -> Any:
        after = body(*given)
        if not tf.executing_eagerly():
            for tensor in list(tf.compat.v1.get_default_graph().internal_captures):
                sums = {read: _sums_after(*read) for read in _reads(tensor)}
                if sum(sums.values()) > 1:
                    own = tensor * tf.cast(_always(given), tensor.dtype)
                    for op, place in (read for read, count in sums.items() if count):
                        op._update_input(place, own)
        return after

    return tf.while_loop(proceeds, iteration, loop_vars, **settings)


def _reads(tensor: Any) -> list[tuple[tf.Operation, int]]:
    """Returns the ops in its graph that read a tensor, each with the place of an input."""
    return [
        (op, place)
        for op in tensor.consumers()
        for place, read in enumerate(op.inputs)
        if read is tensor
    ]


def _sums_after(op: tf.Operation, place: int) -> int:
    """Returns how many sums the input of an op is a term of, unchanged."""
    if op.type in _SUMS:
        return 1
    if op.type in _UNCHANGED:
        same = op.outputs[place : place + 1]
    elif op.type in _CALLS:
        graph = function_graph(op, op.get_attr("f").name)
        same = [] if graph is None else graph.inputs[place : place + 1]
    else:
        return 0
    return sum(_sums_after(*read) for tensor in same for read in _reads(tensor))


def _always(loop_vars: Any) -> tf.Tensor:
    """Returns True, computed from the variables of a loop."""
    whole = (x for x in tf.nest.flatten(loop_vars) if tf.is_tensor(x) and x.dtype.is_integer)
    least = min(whole, key=lambda x: x.shape.rank)
    return tf.reduce_all(least >= least.dtype.min)
