"""Tensors that a traced body reads from outside, besides its arguments.

A gradient of one's own returns gradients of the arguments only, so what else the body reads must
become an argument. Python does not say what that is; the ops of the body do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import record

from tekso.framework import graph_errors, op_signatures
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
      ops: all ops that it added to its graph.
      arguments: places of the arguments that it reads.
      outer: tensors from outside.
      computed: what each op computes.
    """

    ops: Sequence[tf.Operation]
    arguments: frozenset[int]
    outer: list[Any]
    computed: list[Hashable]

    @classmethod
    def of(cls, ops: Sequence[tf.Operation], arguments: Sequence[Any]) -> Reads:
        """Returns what the ops that a body added to its graph read."""
        place = {id(tensor): number for number, tensor in enumerate(arguments)}
        found = frozenset(place[id(t)] for op in ops for t in op.inputs if id(t) in place)
        computed = op_signatures.signatures(ops, arguments)
        return cls(ops, found, read_by(ops, arguments), computed)

    def refuse_other(self, later: Reads, what: str) -> None:
        """Raises a MistakeError if a body reads or computes something else when it runs again.

        Of tensors from outside, those of the graph of its first run are compared.

        Args:
          later: what it reads and computes then.
          what: the body, for the message.
        """
        graph = self.ops[0].graph if self.ops else None
        more = [t for t in new_reads(self.outer, later.outer) if t.graph is graph]
        more = [t for t in more if self._is_computed(t)]
        if more or self.arguments != later.arguments:
            refuse(more, what)
        self.refuse_other_ops(later, what)

    def refuse_other_ops(self, later: Reads, what: str) -> None:
        """Raises a MistakeError if a body computes something else when it runs again.

        What it computed the first time may be missing: it was kept. So may arrays that it had from
        other ops of its graph.
        """
        known = Counter(self.computed)
        for op, computed in zip(later.ops, later.computed, strict=True):
            known[computed] -= 1
            if computed is not None and known[computed] < 0 and not self._has_array(op, computed):
                frames = ((f.filename, f.lineno or 0, f.name) for f in op.traceback or ())
                raise MistakeError(
                    f"{what} is called again for the backward pass, and computes something else "
                    f"then, by an op {op.type}. What it reads from outside, such as an attribute, "
                    "a list, a dict or a counter, must not change until the gradients are "
                    "computed: read it before, into a variable of the function around it"
                    + graph_errors.place_in(frames)
                )

    def _has_array(self, op: tf.Operation, computed: Hashable) -> bool:
        """Returns whether an op is a constant array that the graph of the first run has."""
        if op.type != "Const" or not op.outputs[0].shape.rank:
            return False
        graph = self.ops[0].graph if self.ops else tf.Graph()
        constants = [one for one in graph.get_operations() if one.type == "Const"]
        return computed in op_signatures.signatures(constants, ())

    def _is_computed(self, tensor: Any) -> bool:
        """Returns False for a tensor that the first run made of constants, and kept for later."""
        made = {id(op) for op in self.ops}
        open_ops, seen = [tensor.op], set[int]()
        while open_ops:
            op = open_ops.pop()
            if id(op) not in made:
                return True
            more = [t.op for t in op.inputs if id(t.op) not in seen]
            seen.update(map(id, more))
            open_ops += more
        return False


def new_reads(before: Iterable[Any], later: Iterable[Any]) -> list[Any]:
    """Returns tensors with gradients that a body reads later, but did not read before."""
    known = {id(tensor) for tensor in before}
    eager = tf.__internal__.EagerTensor  # a constant
    unknown = (t for t in later if id(t) not in known and not isinstance(t, eager))
    return [t for t in unknown if has_gradient(t)]


def refuse(more: Sequence[Any], what: str) -> None:
    """Raises a MistakeError about what a body reads only when it runs again."""
    named = ", ".join(f"{t.name} of {t.op.type}, shape {list(t.shape)}" for t in more[:2])
    raise MistakeError(
        f"{what} is called again for the backward pass, and reads {named or 'other arguments'} "
        "then, which it did not read before. What it reads from outside, such as a list, a dict or "
        "an attribute, must not change until the gradients are computed: pass the tensors as "
        "arguments"
    )


def watch(tape: tf.GradientTape, outer: Iterable[Any]) -> None:
    """Watches tensors of another graph. Call it in the block of the tape.

    A tape knows such an input of an op as a tensor of the graph that is being traced, but that of a
    call of a `tf.function` as it was passed.
    """
    for tensor in outer:
        tape.watch(tensor)
        own = inside(tensor)
        if own is not tensor:
            record.record_operation("captured_value", [own], [tensor], lambda d: [d])


def inside(tensor: Any) -> Any:
    """Returns a tensor as the graph that is being traced knows it."""
    graph = tf.compat.v1.get_default_graph()
    is_own = not isinstance(tensor, tf.__internal__.EagerTensor) and tensor.graph is graph
    return tensor if is_own else graph.capture(tensor)
