"""Finds the number of iterations of a loop in a compiled program, by running only its counters.

A loop over layers or over parts of a batch counts integers up or down from constants. These
integers are evaluated through the condition and the body. Other values of the loop are ignored.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.costs.loop_counts import INTEGER_OPS

Scalars = dict[int, int | None]
"""{position of a loop variable: value}; None for a variable that is not a known integer."""

_LONGEST = 10_000_000  # maximum number of iterations that are evaluated


def loop_length(condition: Any, body: Any, start: Scalars) -> int | None:
    """Returns the number of iterations of a loop; None if its condition needs other values.

    Args:
      condition: FunctionDef of the condition.
      body: FunctionDef of the body.
      start: initial values of the loop variables.
    """
    state, length = start, 0
    while length < _LONGEST:
        continues = _outputs(condition, state)[0]
        if continues is None:
            return None
        if not continues:
            return length
        state = _outputs(body, state)
        length += 1
    return None


def _outputs(function: Any, given: Scalars) -> Scalars:
    """Returns the outputs of a function; None for an output that is not a known integer."""
    names = [argument.name for argument in function.signature.input_arg]
    known: dict[str, int | None] = {name: given.get(i) for i, name in enumerate(names)}
    nodes = {node.name: node for node in function.node_def}

    def value(tensor: str) -> int | None:
        name = tensor.partition(":")[0]
        if name not in known:
            known[name] = None  # for ops that are not in INTEGER_OPS
            node = nodes[name]
            if node.op == "Const":
                known[name] = _constant(node)
            elif node.op == "Identity":
                known[name] = value(node.input[0])
            elif node.op in INTEGER_OPS:
                left, right = value(node.input[0]), value(node.input[1])
                if left is not None and right is not None:
                    known[name] = INTEGER_OPS[node.op](left, right)
        return known[name]

    results = [argument.name for argument in function.signature.output_arg]
    return {i: value(function.ret[name]) for i, name in enumerate(results)}


def _constant(node: Any) -> int | None:
    tensor = node.attr["value"].tensor
    if not tf.as_dtype(tensor.dtype).is_integer or tensor.tensor_shape.dim:
        return None
    return int(tf.make_ndarray(tensor))
