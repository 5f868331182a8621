"""Finds the ops of a traced graph that have side effects, such as a message or a check.

These ops must run in the forward pass, once, even if no output depends on them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_READS = frozenset({"ReadVariableOp", "VarHandleOp"})


def effects(graph: Any) -> list[tf.Operation]:
    """Returns the ops of a graph that must run even if no output depends on them."""
    return [op for op in graph.get_operations() if op.op_def.is_stateful and op.type not in _READS]
