"""Finds ops of a traced graph, those that its outputs need or XLA compiles, and graphs in ops."""

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
