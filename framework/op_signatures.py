"""What the ops of a trace compute, to find out whether a body computes the same when called again.

The inputs of an op are compared only if they are arguments of the body. That is enough to find
another weight, another constant such as the number of a draw, and another op.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

_IGNORED_OPS = ("Identity", "IdentityN", "NoOp", "Placeholder")
_IGNORED_ATTRIBUTES = ("container", "message", "shared_name", "summarize", "tag", "token")

# TensorFlow adds ops to the graph of a function when it makes its gradient.
_at_first: MutableMapping[Any, Hashable] = weakref.WeakKeyDictionary()


def signatures(ops: Sequence[tf.Operation], arguments: Iterable[Any]) -> list[Hashable]:
    """Returns for each op what it computes; None: nothing.

    Args:
      ops: ops of one graph.
      arguments: tensors whose places tell the inputs of ops apart.
    """
    places: dict[int, int] = {}
    for place, tensor in enumerate(arguments):
        places.setdefault(id(tensor), place)
    captures = getattr(ops[0].graph, "captures", ()) if ops else ()
    outside = {id(inner): id(outer) for outer, inner in captures}

    def place_of(tensor: Any) -> int | None:
        while (key := outside.get(id(tensor), id(tensor))) not in places:
            if tensor.op.type not in ("Identity", "IdentityN"):
                return None
            tensor = tensor.op.inputs[tensor.value_index]
        return places[key]

    fetched = _fetched(ops[0].graph) if ops else set()
    return [
        None if _only_fetches(op, fetched) else _signature(op, [place_of(t) for t in op.inputs])
        for op in ops
    ]


def _fetched(graph: Any) -> set[int]:
    """Returns the ids of tensors by which a gradient of a loop or branch reads its forward pass."""
    kinds = ("_indirect_captures", "_captured_constants")
    return {id(tensor) for kind in kinds for tensor in getattr(graph, kind, {}).values()}


def _only_fetches(op: tf.Operation, fetched: set[int]) -> bool:
    if any(id(tensor) in fetched for tensor in op.outputs):
        return True
    readers = op.outputs[0].consumers() if op.type == "Const" else []
    return bool(readers) and all(_only_fetches(reader, fetched) for reader in readers)


def _signature(op: tf.Operation, places: Sequence[int | None]) -> Hashable:
    if op.type in _IGNORED_OPS:
        return None
    attributes = sorted(op.node_def.attr.items())
    called = [f.name for _, value in attributes for f in (value.func, *value.list.func) if f.name]
    if called:
        return (op.type, *places, *(_of_function(op, name) for name in called))
    own = (
        (name, hash(value.SerializeToString(deterministic=True)))
        for name, value in attributes
        if not name.startswith("_") and name not in _IGNORED_ATTRIBUTES
    )
    return (op.type, *places, *own)


def _of_function(op: tf.Operation, name: str) -> Hashable:
    """Returns what the ops of a function compute; None: it was not traced here."""
    graph = function_graph(op, name)
    if graph is None:
        return None
    if graph not in _at_first:
        computed = signatures(graph.get_operations(), graph.inputs)
        _at_first[graph] = frozenset(Counter(computed).items())
    return _at_first[graph]


def function_graph(op: tf.Operation, name: str) -> Any:
    """Returns the graph of a function that an op calls; None: it was not traced here."""
    return getattr(op.graph._get_function(name), "graph", None)
