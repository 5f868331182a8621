"""Estimates the time of a traced graph, op by op, from speeds that were measured on this machine.

The speeds are those of one core, or of all cores if one op at a time uses them.

    product                 operations / rate at its operations per byte, plus its bytes /
                            bandwidth for as many bytes
    convolution             operations / rate at its operations per byte
    copy                    bytes read and written / bandwidth
    exponential, …          elements / rate, or as any other op, whichever is longer
    other                   bytes read and written / bandwidth for as many bytes
    cluster of XLA          its inputs and outputs, bytes that its loops read and write, as above,
                            plus the elements of their ops
    product in a loop of    operations / rate, or the bytes of its matrix / bandwidth for a matrix
    a cluster               that every iteration reads, whichever is longer
    every op                plus the time of an op that does nothing

A product of fewer operations per byte than were measured is limited by its bytes: its rate falls
with them.

TensorFlow hands an op to another thread only if it takes more than some microseconds. So of graphs
that run side by side, long ops run at the same time, and short ones one after the other.

The body of a loop counts once per iteration. Ops without a path to an output do not count.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from tekso.framework.costs import graph_work, op_kinds
from tekso.framework.costs.graph_clusters import CompiledCluster
from tekso.framework.costs.this_machine import MachineSpeed, rate

_WITH_RATES = op_kinds.MATRIX_PRODUCTS | op_kinds.CONVOLUTIONS | op_kinds.FILTER_GRADIENTS
_SHORT_S = 3e-6  # 8000 cycles, the threshold of TensorFlow's executor


def seconds(graph: Any, machine: MachineSpeed) -> float:
    """Returns the estimated time of all ops of a graph, one after the other."""
    return seconds_of(graph, needed(graph), machine)


def seconds_of(graph: Any, ops: Iterable[Any], machine: MachineSpeed) -> float:
    """Returns the estimated time of some ops of a graph, one after the other."""
    return math.fsum(_op_seconds(graph, op, machine) for op in ops)


def short_seconds(graph: Any, machine: MachineSpeed) -> float:
    """Returns the time of the ops of a graph that are too short for a thread of their own.

    A loop is short if no op of an iteration is long: the thread that starts it runs all of it.
    """
    found = 0.0
    for op in needed(graph):
        time = _op_seconds(graph, op, machine)
        times, inner = graph_work.inside(graph, op)
        if inner and not is_cluster(op, inner):
            short = machine.op_s + times * max(short_seconds(one, machine) for one in inner)
            found += short if math.isclose(short, time, rel_tol=1e-3) else 0.0
        elif time < _SHORT_S:
            found += time
    return found


def elapsed_seconds(graph: Any, machine: MachineSpeed, *, cores: int) -> float:
    """Returns the time of a graph whose ops run side by side, one on each core.

    An op starts when its inputs exist and a core is free. A short op has to wait for the core that
    computed its last input, because TensorFlow does not hand it to another thread.
    """
    end: dict[str, float] = {}
    core_of: dict[str, int] = {}
    free = [0.0] * cores
    ops = needed(graph)
    names = {op.name for op in ops}
    before = {op.name: _before(op) & names for op in ops}
    waits = {name: len(found) for name, found in before.items()}
    followers: dict[str, list[int]] = {}
    for number, op in enumerate(ops):
        for name in before[op.name]:
            followers.setdefault(name, []).append(number)
    ready = [(0.0, number) for number, op in enumerate(ops) if not waits[op.name]]
    while ready:
        at, number = heapq.heappop(ready)
        op = ops[number]
        time = _op_seconds(graph, op, machine)
        core = min(range(cores), key=free.__getitem__)
        if time < _SHORT_S and before[op.name]:
            core = core_of[max(before[op.name], key=end.__getitem__)]
        end[op.name] = max(at, free[core]) + time
        if time:  # others need no core
            free[core] = end[op.name]
        core_of[op.name] = core
        for after_it in followers.get(op.name, []):
            name = ops[after_it].name
            waits[name] -= 1
            if not waits[name]:
                heapq.heappush(ready, (max(end[n] for n in before[name]), after_it))
    return max(end.values(), default=0.0)


def _before(op: Any) -> set[str]:
    return {t.op.name for t in op.inputs} | {one.name for one in op.control_inputs}


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


def is_cluster(op: Any, inner: Sequence[Any]) -> bool:
    """Returns whether XLA compiles the function that an op calls."""
    for attributes in (op.node_def.attr, *(_attributes(graph) for graph in inner)):
        if "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b:
            return True
    return False


def _attributes(graph: Any) -> Any:
    definition = getattr(graph, "function_def", None)
    return definition.attr if definition is not None else {}


def _op_seconds(graph: Any, op: Any, machine: MachineSpeed) -> float:
    times, inner = graph_work.inside(graph, op)
    if inner:
        if is_cluster(op, inner):
            return times * _cluster_seconds(op, inner[0], machine)
        return machine.op_s + times * max(seconds(one, machine) for one in inner)
    if op.type in op_kinds.INSTANT:
        return 0.0
    return machine.op_s + _work_seconds(op, machine)


def _work_seconds(op: Any, machine: MachineSpeed) -> float:
    moved = _bytes(op.inputs) + _bytes(op.outputs)
    points = {
        **dict.fromkeys(op_kinds.MATRIX_PRODUCTS, machine.products),
        **dict.fromkeys(op_kinds.CONVOLUTIONS, machine.convolutions),
        **dict.fromkeys(op_kinds.FILTER_GRADIENTS, machine.filter_gradients),
    }.get(op.type)
    if points is not None:
        flops = graph_work.op_flops(op)
        intensity = flops / max(moved, 1)
        reached = rate(points, intensity) * min(1.0, intensity / points[0][0])
        fixed = machine.convolution_s
        if op.type in op_kinds.MATRIX_PRODUCTS:
            fixed = machine.product_s + moved / rate(machine.streams, moved)
        return fixed + flops / max(reached, 1.0)
    if op.type in op_kinds.COPIES:
        outputs = _bytes(op.outputs)
        read = outputs if op.type == "GatherNd" else _bytes(op.inputs)
        read = min(read, outputs) if op.type in op_kinds.SLICES else read
        return (read + outputs) / machine.moved_bytes_per_s
    found = moved / rate(machine.streams, moved)
    if op.type in op_kinds.FUNCTIONS:
        found = max(found, _elements(op.outputs) / machine.functions_per_s)
    return found


def _cluster_seconds(op: Any, graph: Any, machine: MachineSpeed) -> float:
    arguments = len(op.inputs) + len(op.outputs)
    return machine.cluster_s + arguments * machine.argument_s + _loops_seconds(graph, machine)


def _loops_seconds(graph: Any, machine: MachineSpeed, *, repeated: bool = False) -> float:
    """Returns the time of the loops of a cluster, or of an iteration of a loop over time in one."""
    found = 0.0
    for loop in CompiledCluster(graph, needed(graph)).loops:
        times, inner = graph_work.inside(graph, loop.op)
        found += machine.loop_s if repeated and not inner else 0.0
        if inner:
            repeats = repeated or loop.op.type in op_kinds.LOOPS
            found += times * max(_loops_seconds(one, machine, repeated=repeats) for one in inner)
        elif repeated and loop.op.type in op_kinds.MATRIX_PRODUCTS:
            matrix = max(_bytes([t]) for t in loop.op.inputs)
            reading = matrix / rate(machine.loop_matrices, matrix)
            found += max(graph_work.op_flops(loop.op) / machine.loop_products_per_s, reading)
        elif loop.op.type in _WITH_RATES:
            found += _work_seconds(loop.op, machine)
        else:
            found += loop.bytes / rate(machine.cluster_streams, loop.bytes)
        found += loop.elements / machine.cluster_elements_per_s
        found += loop.functions / machine.cluster_functions_per_s
        found += loop.sums / machine.cluster_sums_per_s
    return found


def _bytes(tensors: Any) -> float:
    return float(sum(graph_work.size(t) * t.dtype.size for t in tensors if t.dtype.size))


def _elements(tensors: Any) -> float:
    return float(sum(graph_work.size(t) for t in tensors))
