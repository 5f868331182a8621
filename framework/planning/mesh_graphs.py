"""The graphs that one device of a mesh runs in a training step, from the compiled program.

Every device runs the same graphs, on its shards. So their ops have the shapes of shards, and can be
priced like those of a step on one device: graph_time.py has the time of an op, graph_memory.py the
memory.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.costs import (
    graph_memory,
    graph_time,
    graph_walks,
    graph_work,
    op_kinds,
    step_memory,
)
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.planning.compiled_step import CompiledStep, runs_on_mesh
from tekso.framework.planning.partitioned_program import graph_of, loop_lengths


@dataclasses.dataclass(frozen=True)
class DeviceGraphs:
    """What one device runs in a step.

    Attributes:
      graphs: [(number of runs in a step, graph)].
      collectives: bytes of the tensor on this device, for each collective of a step.
      variables: number of weights and slots.
      arrays: number of arrays of a batch.
      calls: number of calls from Python in a step.
      between: bytes of each tensor that exists from the first run of a graph to the last: the
        gradients, if another graph sums or applies them.
      packed: bytes of the array into which the gradients are copied for their all-reduce.
    """

    graphs: Sequence[tuple[int, Any]]
    collectives: Sequence[float]
    variables: int
    arrays: int
    calls: int
    between: Sequence[float] = ()
    packed: float = 0.0

    def ops(self) -> int:
        """Returns the number of ops of a step that take time, without collectives."""
        return sum(
            times
            for graph in self.graphs
            for times, op in _ops(*graph)
            if op.type not in op_kinds.INSTANT
        )

    def seconds(self, machine: MachineSpeed) -> float:
        """Returns the time of all ops but collectives, one after the other."""
        return self._priced(graph_time.seconds, machine)

    def short_seconds(self, machine: MachineSpeed) -> float:
        """Returns the time of the ops that are too short for a thread of their own."""
        return self._priced(graph_time.short_seconds, machine)

    def _priced(self, price: Callable[..., float], machine: MachineSpeed) -> float:
        return math.fsum(
            graph_time.of_runs(price, graph, machine, runs=times, between=moved)
            for (times, graph), moved in zip(self.graphs, self._moved_between, strict=True)
        )

    @functools.cached_property
    def _moved_between(self) -> list[float]:
        return graph_time.moved_by_others(self.graphs)

    def flops(self) -> float:
        """Returns the floating-point operations of a step."""
        return math.fsum(times * graph_work.count(graph).flops for times, graph in self.graphs)

    def peak_bytes(
        self, machine: MachineSpeed, *, devices: int, cores: int, least: float = 0.0
    ) -> float:
        """Returns the bytes that a step needs beyond weights and slots.

        Args:
          machine: its speed decides which ops run at the same time.
          devices: number of devices, which run side by side.
          cores: number of cores that they share; a process has as many threads for ops, and at
            least one for each device.
          least: tensors of fewer bytes do not count.
        """
        tensors = [graph_memory.tensors_of(graph, least=least) for _, graph in self.graphs]
        first, *others = (
            step_memory.peak_of_copies(
                step_memory.timed(each, machine), copies=devices, threads=max(cores, devices)
            )
            for each in tensors
        )
        between = math.fsum(size for size in self.between if size >= least)
        repeated = any(times > 1 for times, _ in self.graphs)
        packed = self.packed if self.packed >= least else 0.0
        peaks = (first + (between if repeated else 0.0), between + packed if packed else 0.0)
        return max([*peaks, *(p + between for p in others)])


def device_graphs(compiled: CompiledStep, *, variables: int, arrays: int) -> DeviceGraphs:
    """Returns the graphs of a device.

    Args:
      compiled: the compiled step.
      variables: number of weights and slots.
      arrays: number of arrays of a batch.
    """
    graphs = [
        (times, _graph(compiled, node.attr["f"].func.name))
        for name, times in compiled.times.items()
        for node in compiled.functions[name].node_def
        if runs_on_mesh(node)
    ]
    collectives = [
        graph_work.size_bytes(op.outputs[0])
        for graph in graphs
        for times, op in _ops(*graph)
        if op.type in op_kinds.COLLECTIVES
        for _ in range(times)
    ]
    repeated = [graph for times, graph in graphs if times > 1]
    between = [graph_work.size_bytes(t) for graph in repeated for t in graph.outputs]
    return DeviceGraphs(
        graphs, collectives, variables=variables, arrays=arrays,
        calls=sum(compiled.times.values()), between=between,
    )  # fmt: skip


def _graph(compiled: CompiledStep, name: str) -> Any:
    """Returns a function as a graph that knows the bodies of its loops and their lengths."""
    definition = copy.deepcopy(compiled.functions[name])
    lengths = loop_lengths(compiled.functions.__getitem__, name)
    bodies = []
    for node in definition.node_def:
        if node.name in lengths:
            node.attr[graph_work.ITERATIONS].i = lengths[node.name] or 1
            bodies.append(node.attr["body"].func.name)
    graph = graph_of(definition, input_shapes=_input_shapes(definition))
    for body in bodies:
        graph._functions[body] = types.SimpleNamespace(graph=_graph(compiled, body))
    return graph


def _input_shapes(definition: Any) -> list[Any]:
    """Returns the shapes of the arguments of a function; None where they are not known."""
    shapes = []
    for number, argument in enumerate(definition.signature.input_arg):
        found = definition.arg_attr[number].attr["_output_shapes"].list.shape
        known = len(found) == 1 and argument.type != tf.resource.as_datatype_enum
        shapes.append(found[0] if known else None)
    return shapes


def _ops(times: int, graph: Any) -> Iterator[tuple[int, Any]]:
    """Yields (number of runs, op) of a graph and the graphs inside its ops.

    A cluster that XLA compiles is one op.
    """
    for op in graph_walks.needed(graph):
        yield times, op
        repeats, inner = graph_work.inside(op)
        for one in inner if not graph_walks.is_cluster(op, inner) else ():
            yield from _ops(times * repeats, one)
