"""What DTensor crashes on, or computes wrong without a word, in a layer's code.

It is looked for in a traced step before anything is placed: each op knows the line that made it.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable

import tensorflow as tf

from tekso.framework.execution.base import ExecutionError


def refuse_traps(ops: Iterable[tf.Operation]) -> None:
    """Checks the ops of the forward pass of a task.

    Raises:
      ExecutionError: there is such an op; names its line, and what to write instead.
    """
    for op in ops:
        problem = _problem(op)
        if problem is not None:
            own = [frame for frame in op.traceback if "/tensorflow/" not in frame.filename]
            place = own[-1] if own else None
            where = f"{place.filename}:{place.lineno}" if place else op.name
            line = linecache.getline(place.filename, place.lineno).strip() if place else op.type
            raise ExecutionError(f"{where}: {line}: on a mesh, {problem}")


def _problem(op: tf.Operation) -> str | None:
    if op.type == "StridedSlice":
        strides = tf.get_static_value(op.inputs[3])
        is_constant = tf.get_static_value(op.inputs[0]) is not None  # is folded, and harmless
        if op.get_attr("new_axis_mask") and not is_constant:
            return "x[:, None] ends the process in DTensor: write tf.expand_dims(x, 1)"
        if strides is not None and (strides < 0).any():
            return (
                "a slice with a negative step gives wrong numbers along a dim that is split: write "
                "tf.gather(x, range(length - 1, -1, -1), axis=…)"
            )
    elif "Random" in op.type:
        return (
            f"{op.type} draws numbers that depend on how tensors lie: draw them by ctx.uniform, or "
            "use the layer Dropout"
        )
    return None
