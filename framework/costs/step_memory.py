"""Simulates the memory of training steps, as TensorFlow allocates it.

towers    threads run their ops side by side, not always in the same order (`executor.py`): the
          pieces that they leave in memory fit the next ones less and less well
parts     the gradients of each part of the batch are added to those before
update    frees the gradients; its new weights and slots replace the old ones at the end
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tekso.framework.costs import executor
from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import Change, Tensors
from tekso.framework.costs.graph_run import GraphRun, Held, HeldMemory

_STEPS = 8
_FIRST_STEPS = 2  # memory that nothing has divided into pieces yet


class Graph(NamedTuple):
    """A graph of the step.

    Attributes:
      tensors: its tensors.
      seconds: {op: time} of its ops.
    """

    tensors: Tensors
    seconds: Mapping[str, float]


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
        ops = [executor.TimedOps(one.ops, one.merged, seconds) for one, seconds in graphs]
        runs = [GraphRun(self.arrays, held, number=number) for number in range(len(graphs))]
        tensors = [one.run() for one, _ in graphs]
        begun: dict[tuple[int, str], Change] = {}
        for number, op, ends in executor.events(ops, threads=self._threads, chance=self._chance):
            if ends:
                change = begun.pop((number, op.name))
                runs[number].end(change._replace(frees=tensors[number].end(op)))
            else:
                begun[number, op.name] = change = tensors[number].begin(op)
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
