"""Ops of a traced graph that do more than to compute their outputs from their inputs.

An effect (a message, a check) has to happen in the forward pass, once, even if nothing depends on
it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_READS = frozenset({"ReadVariableOp", "VarHandleOp"})


def effects(graph: Any) -> list[tf.Operation]:
    """Returns the ops of a graph that have to run whether or not something depends on them."""
    return [op for op in graph.get_operations() if op.op_def.is_stateful and op.type not in _READS]
