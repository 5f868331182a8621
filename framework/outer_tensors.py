"""Tensors that a traced body reads from outside, besides its arguments.

A gradient of one's own returns gradients of the arguments only, so what else the body reads must
become an argument. Python does not say what that is; the ops of the body do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

_WITHOUT_TAPE = ("WhileBodyFuncGraph", "CondBranchFuncGraph")


def learned(found: Iterable[Any], arguments: Iterable[Any] = ()) -> list[Any]:
    """Returns the tensors that gradients may pass through, without the arguments of a body.

    That is, those of floats that depend on what a tape watches. If no tape records, or in the body
    of a loop or branch, whose gradient TensorFlow makes without a tape, all floats.
    """
    known = {id(tensor) for tensor in arguments}
    unique = {id(t): t for t in found if t.dtype.is_floating and id(t) not in known}
    kind = type(tf.compat.v1.get_default_graph()).__name__
    if kind in _WITHOUT_TAPE or not record.could_possibly_record():
        return list(unique.values())
    return [t for t in unique.values() if record.should_record_backprop([t])]


def read_by(ops: Sequence[tf.Operation], arguments: Iterable[Any]) -> list[Any]:
    """Returns the tensors that some ops read, made neither by them nor among the arguments.

    Args:
      ops: all ops that a body added to its graph.
      arguments: the arguments of the body.
    """
    if not ops:
        return []
    made = {id(op) for op in ops if op.type != "Placeholder"}
    # A tensor of another graph is a placeholder here. The body knows the former.
    captures = getattr(ops[0].graph, "captures", ())
    outside = {id(inner): outer for outer, inner in captures}
    known = {id(tensor) for tensor in arguments}
    found = [t for op in ops for t in op.inputs if id(t.op) not in made and id(t) not in known]
    return list({id(t): outside.get(id(t), t) for t in found}.values())


def inside(tensor: Any) -> Any:
    """Returns a tensor as the graph that is being traced knows it."""
    graph = tf.compat.v1.get_default_graph()
    is_own = not isinstance(tensor, tf.__internal__.EagerTensor) and tensor.graph is graph
    return tensor if is_own else graph.capture(tensor)
