"""Calls of functions on a device that computes nothing, which allocate and free what ops would.

A call begins with its first op. `run_calls` runs calls at the same time, so that their ops take
turns in the order of the times at which they begin.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.costs import graph_memory
from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import Change
from tekso.framework.costs.graph_run import GraphRun, HeldMemory
from tekso.framework.costs.graph_time import op_seconds
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.symbolic import spec_of


class HeldArray:
    """A tensor of the simulation; its memory is free when nothing refers to it.

    Attributes:
      spec: its shape and type.
      memory: the array whose memory it has; None: that of a variable.
    """

    def __init__(self, spec: tf.TensorSpec, memory: HeldMemory | None) -> None:
        self.spec, self.memory = spec, memory


class CallGraph(NamedTuple):
    """What a call of a function does.

    Attributes:
      changes: changes of its ops.
      seconds: time of each op.
      inputs: names of its inputs, in order.
      outputs: for each output, its spec and the tensor of the graph whose memory it has.
    """

    changes: Sequence[Change]
    seconds: Sequence[float]
    inputs: Sequence[str]
    outputs: Sequence[tuple[tf.TensorSpec, str]]


class CallParts(NamedTuple):
    """The parts of a function.

    Attributes:
      ops: the ops that it runs.
      inputs: names of its inputs, in order.
      outputs: tensors that it returns.
    """

    ops: Sequence[Any]
    inputs: Sequence[str]
    outputs: Sequence[Any]


class SimulatedCall:
    """A call that has not ended yet.

    Args:
      arrays: the allocator.
      variables: memory of each variable that has some, by name.
      graph: what it does.
      given: its arguments, which live until it ends.

    Attributes:
      ops: what each of its ops changes, and the time of the op.
      run: the run of its graph.
      outputs: what it returns.
    """

    def __init__(
        self,
        arrays: BestFit,
        variables: dict[str, HeldMemory],
        graph: CallGraph,
        given: Sequence[Any],
    ) -> None:
        self._given = given
        self.ops = list(zip(graph.changes, graph.seconds, strict=True))
        memory = {
            name: array.memory
            for name, array in zip(graph.inputs, given, strict=False)
            if isinstance(array, HeldArray)
        }
        computed = {name for change in graph.changes for name in _made(change)}
        results = {name: HeldMemory(arrays) for _, name in graph.outputs if name in computed}
        memory |= results
        self.run = GraphRun(arrays, {}, results=results, variables=variables)
        self.outputs = [HeldArray(spec, memory.get(name)) for spec, name in graph.outputs]


def _made(change: Change) -> Iterator[str]:
    yield from change.takes
    if change.overwrites:
        yield change.overwrites[1]


def graph_of(parts: CallParts, machine: MachineSpeed, least: float) -> CallGraph:
    """Returns what a call of a function does.

    Args:
      parts: its parts.
      machine: speed of a core, for the times of ops.
      least: tensors of fewer bytes do not count.
    """
    ops, inputs, outputs = parts
    if not ops and not outputs:
        return CallGraph([], [], inputs, [])
    graph = (outputs[0] if outputs else ops[0]).graph
    names = graph_memory.memory_of(graph, ops, outputs)
    specs = map(spec_of, outputs)
    changes = list(graph_memory.changes_of(graph, ops, outputs, least=least))
    times = op_seconds(ops, machine)
    seconds = [times[change.op] for change in changes]
    return CallGraph(changes, seconds, inputs, list(zip(specs, names, strict=True)))


class Span(NamedTuple):
    """Calls that run one after the other.

    Attributes:
      start: when the first one begins, in any unit.
      end: when the last one ends.
      begin: begins them, when the simulation reaches the start.
    """

    start: float
    end: float
    begin: Callable[[], list[SimulatedCall]]


_END, _START = 0, 1  # what ends at a time, ends before other things start


def run_calls(spans: Iterable[Span]) -> None:
    """Runs the calls of all spans."""
    number = itertools.count()
    # (time, _END or _START, number, what)
    todo: list[tuple[float, int, int, Any]] = []
    for span in spans:
        heapq.heappush(todo, (span.start, _START, next(number), span))
    while todo:
        now, kind, _, what = heapq.heappop(todo)
        if kind == _START:
            ops = _ops(now, what.end, what.begin())
            heapq.heappush(todo, (now, _END, next(number), ops))
            continue
        following = next(what, None)
        if following is not None:
            heapq.heappush(todo, (following, _END, next(number), what))


def _ops(start: float, end: float, calls: list[SimulatedCall]) -> Iterator[float]:
    """Runs the ops of calls; yields the time when the one that has begun ends."""
    left = math.fsum(seconds for call in calls for _, seconds in call.ops)
    now = start
    while calls:
        call = calls.pop(0)
        for change, seconds in call.ops:
            call.run.begin(change)
            now = min(end, now + (end - now) * (seconds / left if left > 0.0 else 0.0))
            left -= seconds
            yield now
            call.run.end(change)
