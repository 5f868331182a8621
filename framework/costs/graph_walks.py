"""Finds the ops of a traced graph that run, those that XLA compiles, and graphs in ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any


def needed(graph: Any) -> list[Any]:
    """Returns the ops on which an output of a function graph depends, in the order of the graph."""
    outputs = getattr(graph, "outputs", None)
    if outputs is None:
        return list(graph.get_operations())
    stateful = [op for op in graph.get_operations() if op.op_def and op.op_def.is_stateful]
    return above(graph, [*(t.op for t in outputs), *stateful])


def needed_for(graph: Any, outputs: Sequence[Any]) -> list[Any]:
    """Returns the ops that some outputs need, and those with an effect, in the graph's order."""
    effects = [op for op in graph.get_operations() if op.op_def.is_stateful and not op.outputs]
    return above(graph, [*(tensor.op for tensor in outputs), *effects])


def needed_values(loop: Any, read: Iterable[int]) -> set[int]:
    """Returns the numbers of the values of a loop that its iterations have to compute.

    TensorFlow leaves out values that nothing reads. A gradient saves more of each iteration than it
    uses, such as values for the gradient of a constant.

    Args:
      loop: the loop.
      read: numbers of the outputs that are read.
    """
    condition, body = (function_graph(loop, loop.get_attr(name)) for name in ("cond", "body"))
    if condition is None:  # of a program that was not traced here
        return set(range(len(loop.outputs)))
    found = set(read) | read_inputs(condition, needed_for(condition, condition.outputs))
    while True:
        ops = needed_for(body, [body.outputs[number] for number in sorted(found)])
        more = read_inputs(body, ops) - found
        if not more:
            return found
        found |= more


def read_inputs(graph: Any, ops: Sequence[Any]) -> set[int]:
    """Returns the numbers of the inputs of a graph that are among its ops."""
    names = {op.name for op in ops}
    return {number for number, tensor in enumerate(graph.inputs) if tensor.op.name in names}


def above(graph: Any, ops: Iterable[Any]) -> list[Any]:
    """Returns ops and those on which they depend, in the order of the graph."""
    return _found(graph, ops, lambda op: [*(t.op for t in op.inputs), *op.control_inputs])


def after(graph: Any, ops: Iterable[Any], given: Set[str]) -> list[Any]:
    """Returns ops and those that run after some tensors exist, in the order of the graph.

    Control inputs do not count: the ops that computed these tensors ran before.

    Args:
      graph: the graph.
      ops: the ops.
      given: names of the tensors.
    """
    return _found(graph, ops, lambda op: [t.op for t in op.inputs if t.name not in given])


def _found(graph: Any, ops: Iterable[Any], before: Callable[[Any], list[Any]]) -> list[Any]:
    found, open_ops = set(), list(ops)
    while open_ops:
        op = open_ops.pop()
        if op.name not in found:
            found.add(op.name)
            open_ops += before(op)
    return [op for op in graph.get_operations() if op.name in found]


def function_graph(op: Any, called: Any) -> Any:
    """Returns the graph of a function that an op runs; None: it was not traced here.

    Args:
      op: the op.
      called: attribute of the op with the function, such as `op.get_attr("body")`.
    """
    return getattr(op.graph._get_function(called.name), "graph", None)


def is_cluster(op: Any, inner: Sequence[Any]) -> bool:
    """Returns whether XLA compiles the function that an op calls."""
    if not inner:
        return False
    for attributes in (op.node_def.attr, *(_attributes(graph) for graph in inner)):
        if "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b:
            return True
    return False


def _attributes(graph: Any) -> Any:
    definition = getattr(graph, "function_def", None)
    return definition.attr if definition is not None else {}
