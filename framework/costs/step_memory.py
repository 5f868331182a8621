"""Simulates the memory of training steps on one device, as TensorFlow allocates it, and of copies.

towers    threads run their ops side by side, not always in the same order (`executor.py`): the
          pieces that they leave in memory fit the next ones less and less well
parts     the gradients of each part of the batch are added to those before
update    frees the gradients; its new weights and slots replace the old ones at the end
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tekso.framework.costs import executor, graph_time
from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import Change, Tensors
from tekso.framework.costs.graph_run import GraphRun, Held, HeldMemory
from tekso.framework.costs.this_machine import MachineSpeed

_STEPS = 8
_FIRST_STEPS = 2  # memory that nothing has divided into pieces yet


class Graph(NamedTuple):
    """A graph of a step.

    Attributes:
      tensors: its tensors.
      ops: its ops.
    """

    tensors: Tensors
    ops: executor.TimedOps


def timed(tensors: Tensors, machine: MachineSpeed) -> Graph:
    """Returns a graph with the times of its ops."""
    ops, seconds = tensors.ops, _op_seconds(tensors.ops, machine)
    collectives = executor.collectives_of(ops)
    return Graph(tensors, executor.TimedOps(ops, tensors.merged, seconds, collectives))


def _op_seconds(ops: Sequence[Any], machine: MachineSpeed) -> dict[str, float]:
    """Returns {name: time} of ops, also of those of iterations: as long in each."""
    of_graph: dict[int, dict[str, Any]] = {}  # {graph: its ops}
    for op in ops:
        original = getattr(op, "original", op)
        if original is not None:
            of_graph.setdefault(id(original.graph), {}).setdefault(original.name, original)
    found = {
        (number, name): seconds
        for number, these in of_graph.items()
        for name, seconds in graph_time.op_seconds(list(these.values()), machine).items()
    }
    originals = ((op, getattr(op, "original", op)) for op in ops)
    return {
        op.name: machine.op_s if one is None else found[id(one.graph), one.name]
        for op, one in originals
    }


def peak_bytes(
    state: Sequence[float],
    tower: Graph,
    update: Graph,
    gradients: Mapping[str, float],
    *,
    towers: int,
    parts: int,
    threads: int,
) -> float:
    """Returns the largest number of bytes in use during a few steps.

    Args:
      state: bytes of each weight and slot.
      tower: the gradients of a part of the batch.
      update: the update.
      gradients: {input of the update: bytes} of the gradients of all towers.
      towers: number of towers.
      parts: number of accumulation steps.
      threads: number of threads that run ops.
    """
    constants = [*tower.tensors.constants, *update.tensors.constants]
    memory = _Memory(state, constants, threads)
    for step in range(_STEPS):
        if step == _FIRST_STEPS:
            memory.arrays.forget_peak()
        found = memory.run([tower] * towers)
        for _ in range(parts - 1):
            memory.run([tower] * towers)  # what they leave is freed at once
        memory.replace(memory.run([update], memory.given(gradients, found)))
    return memory.arrays.peak


def peak_of_copies(graph: Graph, *, copies: int, threads: int) -> float:
    """Returns the largest number of bytes that copies of a graph hold, for each copy.

    Args:
      graph: the graph.
      copies: how many of it run side by side, on a device each.
      threads: number of threads that run the ops of all copies.
    """
    sizes: dict[tuple[int, str], float] = {}
    held = peak = 0.0
    for number, change, ends in _changes([graph] * copies, threads, random.Random(0)):
        if not ends:
            sizes |= {(number, name): size for name, size in change.takes.items()}
            held += math.fsum(change.takes.values()) + change.temporary
            peak = max(peak, held)
            continue
        if change.overwrites:
            before, after = change.overwrites
            sizes[number, after] = sizes.pop((number, before))
        held -= math.fsum(sizes.pop((number, name), 0.0) for name in change.frees)
        held -= change.temporary
    return peak / copies + math.fsum(graph.tensors.constants)


def _changes(
    graphs: Sequence[Graph], threads: int, chance: random.Random
) -> Iterator[tuple[int, Change, bool]]:
    """Runs graphs side by side; yields (graph, what an op changes, whether the op ends)."""
    ops = [graph.ops for graph in graphs]
    runs = [graph.tensors.run() for graph in graphs]
    begun: dict[tuple[int, str], Change] = {}
    for number, op, ends in executor.events(ops, threads=threads, chance=chance):
        if ends:
            change = begun.pop((number, op.name))
            yield number, change._replace(frees=runs[number].end(op)), True
        else:
            begun[number, op.name] = runs[number].begin(op)
            yield number, begun[number, op.name], False


class _Memory:
    """The memory of a device.

    Args:
      state: bytes of each weight and slot.
      constants: bytes of other tensors that stay.
      threads: number of threads that run ops.

    Attributes:
      arrays: the allocator.
    """

    def __init__(self, state: Sequence[float], constants: Iterable[float], threads: int) -> None:
        self.arrays = BestFit()
        self._threads, self._chance = threads, random.Random(0)
        self._state: dict[float, list[HeldMemory]] = {}  # {bytes: weights and slots}
        for size in state:
            self._state.setdefault(size, []).append(HeldMemory(self.arrays, size))
        self._constants = [HeldMemory(self.arrays, size) for size in constants]

    def run(self, graphs: Sequence[Graph], given: Held | None = None) -> Held:
        """Runs graphs side by side; returns what they leave.

        Args:
          graphs: the graphs.
          given: memory of inputs that the only graph may free; see `given`.
        """
        held = {} if given is None else given
        runs = [GraphRun(self.arrays, held, number=number) for number in range(len(graphs))]
        for number, change, ends in _changes(graphs, self._threads, self._chance):
            if ends:
                runs[number].end(change)
            else:
                runs[number].begin(change)
        return held

    def given(self, inputs: Mapping[str, float], found: Held) -> Held:
        """Gives memory to the inputs of the next graph, by their bytes; frees and removes the rest.

        Inputs that share an array with another one, such as gradients of weights that are added,
        get one of their own: what the graph does with one of them must not free the other.
        """
        of_size: dict[float, list[HeldMemory]] = {}
        for memory in found.values():
            of_size.setdefault(memory.size, []).append(memory)
        found.clear()
        return {
            (0, tensor): of_size[size].pop() if of_size.get(size) else HeldMemory(self.arrays, size)
            for tensor, size in inputs.items()
        }

    def replace(self, found: Held) -> None:
        """Frees weights and slots for each new array of as many bytes; frees what is none."""
        for memory in found.values():
            if memory.size in self._state:
                self._state[memory.size].pop(0)
                self._state[memory.size].append(memory)
