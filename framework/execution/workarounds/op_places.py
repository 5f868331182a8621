"""Finds the line of a layer that created an op, also of an op that an error of DTensor describes.

Defect: DTensor's messages name the outermost line of the program, such as that of the command, for
an op of a step, and no line for an op of a stage.
"""

from __future__ import annotations

import linecache
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import graph_errors

_NAME = re.compile(r'fused\["[^"]*", "(?:part/)?([^"@]+)@')
_OPERATION = re.compile(r'see current operation: [^=]*= "tf\.(\w+)"')
_SHAPE = re.compile(r"_global_shape = \[#tf_type\.shape<([\dx]*)>")
_MOST_PLACES = 3
_FRAMEWORK = os.path.dirname(graph_errors.__file__) + os.sep
_DECORATOR = os.path.join(_FRAMEWORK, "primitives", "custom_gradient.py")
_SWISH = "/tensorflow/python/ops/nn_impl.py"
TAPE = "gradient_tape/"
"""Begins the name of an op of a gradient; the name or the scope of the forward op follows."""


def ops_of(graph: Any) -> Iterator[tf.Operation]:
    """Yields the ops of a graph and of the bodies of its loops, branches and functions."""
    yield from graph.get_operations()
    for function in graph._functions.values():  # the public API has no line numbers
        if getattr(function, "graph", None) is not None:
            yield from ops_of(function.graph)


def place_of(op: tf.Operation) -> str:
    """Returns the line outside of TensorFlow that created an op: "FILE:LINE: code"."""
    frame = _frame(op)
    if frame is None:
        return f"{op.name}: {op.type}"
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno}: {code}"


def whose(op: tf.Operation) -> str:
    """Returns the place of an op; of an op of a gradient, the place of the op that it is for."""
    forward = forward_of(op)
    if forward is None or forward is op:
        return place_of(op)
    parts = op.name.removeprefix(TAPE).rpartition("/")[0]
    is_own = forward.name in (parts, f"{parts}/{op.type}")
    return f"{'the gradient of' if is_own else 'a gradient near'} {place_of(forward)}"


def forward_of(op: tf.Operation) -> tf.Operation | None:
    """Returns the op that an op of a gradient is for, or one near it, with a line; None: none.

    Of an op that is not of a gradient, it is the op itself.
    """
    if not op.name.startswith(TAPE):
        return op
    forward = {other.name: other for other in op.graph.get_operations()}
    parts = op.name.removeprefix(TAPE).split("/")[:-1]
    for name in ("/".join(parts), "/".join([*parts, op.type])):
        if name in forward:
            return forward[name]
    near = [op]
    for each in near:  # breadth first
        before = [tensor.op for tensor in each.inputs if tensor.op.type != "Const"]
        for other in before:
            if not other.name.startswith(TAPE) and _frame(other) is not None:
                return other
        near += [other for other in before if other not in near]
    return None


def is_of_layer(op: tf.Operation) -> bool:
    """Returns whether the innermost line that created an op is neither Tekso's nor a library's."""
    frame = _frame(op)
    return frame is not None and not (
        graph_errors.is_library_file(frame.filename) or graph_errors.is_own_file(frame.filename)
    )


def has_own_gradient(op: tf.Operation) -> bool:
    """Returns whether an op is a custom gradient of a layer.

    Those of Tekso's framework and TensorFlow's swish are the derivatives of the values, computed
    with less work.
    """
    if op.type != "IdentityN" or "_gradient_op_type" not in op.node_def.attr:
        return False
    frame = _frame(op)
    if frame is None or frame.filename.startswith(_FRAMEWORK):
        return False
    return not any(inner.filename.endswith(_SWISH) for inner in op.traceback)


def described(message: str, graphs: Sequence[Any]) -> tuple[str, str] | None:
    """Returns the type and the place of the op that a message of DTensor describes, or None.

    The message has the type of the op, and its name or the shape of its first result. If several
    lines created such ops, the place names up to three.

    Args:
      message: the message.
      graphs: traced graphs, one of which has the op; the last one that has such an op counts.
    """
    operation, named = _OPERATION.search(message), _NAME.search(message)
    if operation is None:
        return None
    kind, shape = operation.group(1), _SHAPE.search(message, operation.end())
    for graph in reversed(graphs):
        found = [op for op in ops_of(graph) if op.type == kind]
        found = [op for op in found if named and op.name == named.group(1)] or found
        if shape is not None:
            found = [op for op in found if _has_shape(op, shape.group(1))] or found
        if found:
            return kind, _listed(found)
    return None


def place_of_lookup(ops: Iterable[tf.Operation], rows: int) -> str:
    """Returns the place of the lookups in a table of so many rows, for `graph_errors`; "": none.

    Args:
      ops: the ops of the graphs that ran.
      rows: number of rows of the table.
    """
    places = dict.fromkeys(
        place
        for op in ops
        if op.type == "GatherV2" and op.inputs[0].shape[:1] == [rows]
        if (place := graph_errors.place_in(_frames(op)))
    )
    return "".join([*places][:_MOST_PLACES])


def _frames(op: tf.Operation) -> list[tuple[str, int, str]]:
    return [(frame.filename, frame.lineno or 0, frame.name) for frame in op.traceback or ()]


def _listed(found: Iterable[tf.Operation]) -> str:
    places = list(dict.fromkeys(whose(op) for op in found))
    more = ["…"] if len(places) > _MOST_PLACES else []
    return " or ".join([*places[:_MOST_PLACES], *more])


def _frame(op: tf.Operation) -> traceback.FrameSummary | None:
    # An op that was copied with its graph has no traceback.
    own = [
        frame
        for frame in op.traceback or ()
        if "/tensorflow/" not in frame.filename and frame.filename != _DECORATOR
    ]
    return own[-1] if own else None


def _has_shape(op: tf.Operation, text: str) -> bool:
    shape = op.outputs[0].shape if op.outputs else None
    return shape is not None and shape.rank is not None and "x".join(map(str, shape)) == text
