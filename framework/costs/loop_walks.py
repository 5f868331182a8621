"""Finds what a loop of a traced graph computes: TensorFlow leaves out values that nothing reads.

A gradient saves more of each iteration than it uses, such as values for the gradient of a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tekso.framework.costs.graph_walks import above, function_graph


def needed_values(loop: Any, read: Iterable[int]) -> set[int]:
    """Returns the numbers of the values of a loop that its iterations have to compute.

    Args:
      loop: the loop.
      read: numbers of the outputs that are read.
    """
    condition, body = (function_graph(loop, loop.get_attr(name)) for name in ("cond", "body"))
    if condition is None:  # of a program that was not traced here
        return set(range(len(loop.outputs)))
    found = set(read) | _read_inputs(condition, needed_for(condition, condition.outputs))
    while True:
        ops = needed_for(body, [body.outputs[number] for number in sorted(found)])
        more = _read_inputs(body, ops) - found
        if not more:
            return found
        found |= more


def needed_for(graph: Any, outputs: Sequence[Any]) -> list[Any]:
    """Returns the ops that some outputs need, and those with an effect, in the graph's order."""
    effects = [op for op in graph.get_operations() if op.op_def.is_stateful and not op.outputs]
    return above(graph, [*(tensor.op for tensor in outputs), *effects])


def _read_inputs(graph: Any, ops: Sequence[Any]) -> set[int]:
    names = {op.name for op in ops}
    return {number for number, tensor in enumerate(graph.inputs) if tensor.op.name in names}
