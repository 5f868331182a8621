"""Tensors that a traced body reads from outside, besides its arguments.

A gradient of one's own returns gradients of the arguments only, so what else the body reads must
become an argument. Python does not say what that is; the ops of the body do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record

from tekso.framework.nests import has_gradient
from tekso.framework.user_mistakes import MistakeError

_WITHOUT_TAPE = ("WhileBodyFuncGraph", "CondBranchFuncGraph")


def learned(found: Iterable[Any], arguments: Iterable[Any] = ()) -> list[Any]:
    """Returns the tensors that gradients may pass through, without the arguments of a body.

    That is, those of floats or complex numbers that depend on what a tape watches. If no tape
    records, or in the body of a loop or branch, whose gradient TensorFlow makes without a tape, all
    of them.
    """
    known = {id(tensor) for tensor in arguments}
    unique = {id(t): t for t in found if has_gradient(t) and id(t) not in known}
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
    read = [t for op in ops for t in op.inputs if id(t.op) not in made and id(t) not in known]
    found = (outside.get(id(t), t) for t in read)
    return list({id(t): t for t in found if id(t) not in known}.values())


class Reads(NamedTuple):
    """The tensors that a body reads.

    Attributes:
      arguments: places of the arguments that it reads.
      outer: tensors from outside.
      graph: the graph of its ops.
    """

    arguments: frozenset[int]
    outer: list[Any]
    graph: Any

    @classmethod
    def of(cls, ops: Sequence[tf.Operation], arguments: Sequence[Any]) -> Reads:
        """Returns what the ops that a body added to its graph read."""
        place = {id(tensor): number for number, tensor in enumerate(arguments)}
        found = frozenset(place[id(t)] for op in ops for t in op.inputs if id(t) in place)
        return cls(found, read_by(ops, arguments), tf.compat.v1.get_default_graph())

    def check_same(self, later: Reads, what: str) -> None:
        """Raises a MistakeError if a body read something else when it ran again.

        Args:
          later: what it read then; compared are arguments, and floats if both graphs are the same.
          what: the body, for the message.
        """
        known = {id(tensor) for tensor in self.outer}
        more = [t for t in later.outer if has_gradient(t) and id(t) not in known]
        if later.graph is not self.graph:
            more = [t for t in more if self._is_here(t)]
        if self.arguments != later.arguments or more:
            raise MistakeError(
                f"{what} is called again for the backward pass, and reads "
                f"{_named(more) or 'other arguments'} then, which it did not read before. What it "
                "reads from outside, such as a list, a dict or an attribute, must not change until "
                "the gradients are computed: pass the tensors as arguments"
            )

    def _is_here(self, tensor: Any) -> bool:
        return not isinstance(tensor, tf.__internal__.EagerTensor) and tensor.graph is self.graph


def _named(tensors: Sequence[Any]) -> str:
    return ", ".join(f"{t.name} of {t.op.type}, shape {list(t.shape)}" for t in tensors[:2])


def inside(tensor: Any) -> Any:
    """Returns a tensor as the graph that is being traced knows it."""
    graph = tf.compat.v1.get_default_graph()
    is_own = not isinstance(tensor, tf.__internal__.EagerTensor) and tensor.graph is graph
    return tensor if is_own else graph.capture(tensor)
