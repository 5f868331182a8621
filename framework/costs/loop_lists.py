"""What loops and branches of a traced graph save in lists and optionals: items and their bytes.

A loop that saves values for its gradient, or fills an array, adds an item in each iteration. A list
that is made of a tensor or filled with zeros has all its items from the beginning, and a loop that
replaces them needs no memory for others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import graph_work, op_kinds

_SAVES = "TensorListPushBack"
_FILLS = frozenset({_SAVES, "TensorListSetItem"})
GROWING = _FILLS | {"AddN"}
"""Ops whose list contains that of an input, and the other inputs."""


class ListItems(NamedTuple):
    """The items of a list of tensors.

    Attributes:
      name: the list; equal for names of the same list.
      length: number of items.
      each: bytes that an item adds; 0 if the items are in the memory of other tensors.
      size: bytes of an item.
    """

    name: str
    length: int
    each: float
    size: float

    @property
    def bytes(self) -> float:
        """Bytes that all items add."""
        return self.length * self.each


def list_items(tensor: Any) -> ListItems | None:
    """Returns the items of a list of tensors; None: their number or size is unknown."""
    added = 0
    while tensor.op.type in op_kinds.SAME_MEMORY | _FILLS:
        if tensor.op.type in _FILLS:
            added, size = added + 1, graph_work.size_bytes(tensor.op.inputs[-1])
        tensor = tensor.op.inputs[tensor.value_index]
    if added:
        return ListItems(tensor.name, added, size, size)
    op = tensor.op
    if op.type in ("EmptyTensorList", "TensorListReserve"):
        return ListItems(tensor.name, 0, 0.0, 0.0)
    if op.type == "ZerosLike":
        found = list_items(op.inputs[0])
        return found and found._replace(name=tensor.name, each=found.size)
    if op.type == "TensorListFromTensor" and op.inputs[0].shape.is_fully_defined():
        whole = op.inputs[0]
        count = whole.shape[0]
        each = graph_work.size_bytes(whole) / max(count, 1)
        return ListItems(tensor.name, count, each, each)
    inner = graph_work.inside(op)[1]  # nothing if the loop was not traced here
    if op.type not in op_kinds.LOOPS or not inner or graph_work.iterations(op) is None:
        return None
    number, body = tensor.value_index, inner[0]
    if origin(body.outputs[number]) is body.inputs[number]:  # no iteration changes the list
        return list_items(op.inputs[number])
    return added_items(op)[number]


def lists_of(op: Any, least: float, live: set[int] | None) -> dict[int, ListItems]:
    """Returns {output: the list that an op makes or fills}; no bytes: in the memory of its input.

    An output that no iteration of a loop changes is in the memory of its input too. Those that are
    not `live` are not computed.
    """
    if op.type in ("TensorListFromTensor", "ZerosLike") and op.outputs[0].dtype == tf.variant:
        items = list_items(op.outputs[0])
        return {0: items} if items and items.each >= max(least, 1.0) else {}
    if op.type in op_kinds.BRANCHES:
        saved = ((n, _saved_by_branches(op, n)) for n in range(len(op.outputs)))
        return {
            n: ListItems(op.outputs[n].name, 1, size, size) for n, size in saved if size >= least
        }
    inner = graph_work.inside(op)[1]
    if op.type not in op_kinds.LOOPS or not inner:
        return {}
    body = inner[0]
    found = {}
    for number, items in added_items(op, live).items():
        adds = origin(body.outputs[number]).op.type == _SAVES
        given = None if adds else list_items(op.inputs[number])
        is_full = given is not None and given.length > 0
        found[number] = items._replace(each=0.0) if is_full or items.each < least else items
    for number, tensor in enumerate(body.outputs):
        if origin(tensor) is body.inputs[number] or (live is not None and number not in live):
            found[number] = ListItems(tensor.name, 0, 0.0, 0.0)
    return found


def _saved_by_branches(op: Any, number: int) -> float:
    """Returns the bytes that an output holds for the gradient; -1: it is no such output.

    It is an optional: the branch that runs may not compute the value. The largest one counts.
    """
    found = -1.0
    for graph in graph_work.inside(op)[1]:
        made = origin(graph.outputs[number]).op
        if made.type == "OptionalFromValue":
            values = [origin(tensor) for tensor in made.inputs]
            own = [value for value in values if value.op.type != "Placeholder"]
            found = max(found, math.fsum(map(graph_work.size_bytes, own)))
    return found


def added_items(op: Any, live: set[int] | None = None) -> dict[int, ListItems]:
    """Returns {output of a loop: items that the loop adds to this list}.

    Args:
      op: the loop.
      live: numbers of the values that it computes; None: all.
    """
    times, (body, *_) = graph_work.inside(op)
    after = dict(zip((x.name for x in body.inputs), body.outputs, strict=True))
    seen = set()  # tensors whose memory a list has already
    found: dict[int, ListItems] = {}
    lists = [(n, t) for n, t in enumerate(body.outputs) if t.dtype == tf.variant]
    # What the gradient saves is held until it is computed, an array only until it is stacked.
    for number, tensor in sorted(lists, key=lambda one: origin(one[1]).op.type != _SAVES):
        made, list_name = origin(tensor).op, op.outputs[number].name
        found[number] = ListItems(list_name, times, 0.0, 0.0)
        if made.type not in _FILLS or (live is not None and number not in live):
            continue
        item = origin(made.inputs[-1])
        each = graph_work.size_bytes(item)
        found[number] = ListItems(list_name, times, 0.0, each)
        # What an iteration is given is what the one before has computed, or what never changes.
        name = origin(after.get(item.name, item)).name
        is_unchanged = item.name in after and name == item.name
        if not is_unchanged and name not in seen:
            seen.add(name)
            found[number] = ListItems(list_name, times, each, each)
    return found


def origin(tensor: Any) -> Any:
    """Returns the tensor whose memory a tensor has."""
    while tensor.op.type in op_kinds.EXISTING_MEMORY and len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor
