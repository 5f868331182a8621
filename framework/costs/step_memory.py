"""Simulates the memory of training steps, as TensorFlow allocates it.

towers    their ops run side by side, not always in the same order: the pieces that they leave
          in memory fit the next ones less and less well
parts     the gradients of each part of the batch are added to those before
update    frees the gradients; its new weights and slots replace the old ones at the end
"""

from __future__ import annotations

import collections
import random
from collections.abc import Mapping, Sequence

from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import Change
from tekso.framework.costs.graph_run import GraphRun, Held, HeldMemory

Ops = Sequence[Change]
"""What the ops of a graph change in memory, in their order; see `graph_memory.changes`."""

_STEPS = 8
_FIRST_STEPS = 2  # memory that nothing has divided into pieces yet
_MOST_AHEAD = 1  # ops by which a tower may be ahead of another one


def peak_bytes(
    state: Sequence[float],
    tower: Ops,
    update: Ops,
    gradients: Mapping[str, float],
    *,
    towers: int,
    parts: int,
) -> float:
    """Returns the largest number of bytes in use during a few steps.

    Args:
      state: bytes of each weight and slot.
      tower: the ops of a tower.
      update: the ops of the update.
      gradients: {input of the update: bytes} of the gradients of all towers.
      towers: number of towers.
      parts: number of accumulation steps.
    """
    memory = _Memory(state)
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

    Attributes:
      arrays: the allocator.
    """

    def __init__(self, state: Sequence[float]) -> None:
        self.arrays = BestFit()
        self._random = random.Random(0)
        self._state: dict[float, list[HeldMemory]] = {}  # {bytes: weights and slots}
        for size in state:
            self._state.setdefault(size, []).append(HeldMemory(self.arrays, size))

    def run(self, graphs: Sequence[Ops], given: Held | None = None) -> Held:
        """Runs graphs side by side; returns what they leave.

        Args:
          graphs: their ops.
          given: memory of inputs that the only graph may free; see `given`.
        """
        held = {} if given is None else given
        runs = [GraphRun(self.arrays, held, number=number) for number in range(len(graphs))]
        left = {number: collections.deque(graph) for number, graph in enumerate(graphs)}
        running: dict[int, Change] = {}
        while left:
            most = max(map(len, left.values()))
            number = self._random.choice([n for n in left if len(left[n]) >= most - _MOST_AHEAD])
            if number in running:
                runs[number].end(running.pop(number))
            if left[number]:
                running[number] = left[number].popleft()
                runs[number].begin(running[number])
            else:
                del left[number]
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
