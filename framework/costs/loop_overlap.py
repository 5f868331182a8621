"""Finds what loops of a traced graph hold more than once, because their iterations overlap.

TensorFlow starts up to `parallel_iterations` iterations of a loop before the first one ends. A
result that waits for a value of the previous iteration, without depending on it, then exists for
each of them. An example is the gradient of a weight, which is added to that of the iterations
before:

    iteration 1    state ──► gradient ──► sum
                     ▼                     ▼
    iteration 2    state ──► gradient ──► sum      the second gradient need not wait for the sum

How many exist depends on how long the ops take, and varies from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import tensorflow as tf

from tekso.framework.costs import graph_walks, graph_work, op_kinds

_POPS = "TensorListPopBack"  # takes no time, so nothing waits for it
_EXISTING = op_kinds.EXISTING_MEMORY | op_kinds.INSTANT


def waiting_bytes(graph: Any) -> float:
    """Returns the bytes by which overlapping iterations of a loop can raise the memory of a graph.

    Of several loops, also in other loops and in functions, the one with the most counts. Those that
    XLA compiles do not overlap their iterations.
    """
    most = 0.0
    ops = graph_walks.needed(graph)
    read = {t.name for op in ops for t in op.inputs} | {t.name for t in graph.outputs}
    for op in ops:
        inner = graph_work.inside(op)[1]
        if not graph_walks.is_cluster(op, inner):
            most = max([most, *map(waiting_bytes, inner)])
            if op.type in op_kinds.LOOPS and inner:
                most = max(most, _of_loop(op, inner[0], read))
    return most


def _of_loop(loop: Any, body: Any, read: Set[str]) -> float:
    """Returns the bytes of what waits in all iterations but the first that can overlap.

    Args:
      loop: the loop.
      body: graph of an iteration.
      read: names of the tensors that are read after the loop, and others.
    """
    at_once = int(loop.get_attr("parallel_iterations"))
    times = graph_work.iterations(loop)
    others = (at_once if times is None else min(at_once, times)) - 1
    if others < 1:
        return 0.0
    outputs = {n for n, tensor in enumerate(loop.outputs) if tensor.name in read}
    return others * math.fsum(_waiting(body, graph_walks.needed_values(loop, outputs)).values())


def _waiting(body: Any, live: Set[int]) -> dict[str, float]:
    """Returns {tensor: bytes} of what can wait for a value of the previous iteration.

    Args:
      body: graph of an iteration.
      live: numbers of the values that it computes.
    """
    numbers: dict[str, int] = {x.op.name: n for n, x in enumerate(body.inputs)}
    made = [graph_work.root(tensor).op for tensor in body.outputs]
    changed = {n for n, op in enumerate(made) if op is not body.inputs[n].op and op.type != _POPS}
    ops = graph_walks.needed_for(body, [body.outputs[number] for number in sorted(live)])
    # {op: numbers of the values on which it depends, through all iterations before}
    needs: dict[str, frozenset[int]] = {op.name: frozenset() for op in ops}
    is_open = True
    while is_open:
        is_open = False
        for op in ops:
            before = {t.op.name for t in op.inputs} | {o.name for o in op.control_inputs}
            number = numbers.get(op.name)
            own: set[int] = set()
            if number in changed:
                own, before = {number}, {body.outputs[number].op.name}
            after = frozenset(own).union(*(needs[name] for name in before))
            is_open |= after != needs[op.name]
            needs[op.name] = after
    found = {}
    for op in ops:
        if op.type in op_kinds.SAME_MEMORY or any(t.dtype == tf.variant for t in op.outputs):
            continue  # the items of a list are held anyway
        for tensor in map(graph_work.root, op.inputs):
            if tensor.op.type not in _EXISTING and needs[tensor.op.name] < needs[op.name]:
                found[tensor.name] = graph_work.size_bytes(tensor)
    return found
