"""Simulates the memory of training steps, as TensorFlow allocates it.

towers    their ops run side by side, not always in the same order: the pieces that they leave
          in memory fit the next ones less and less well
parts     the gradients of each part of the batch are added to those before
update    frees the gradients; its new weights and slots replace the old ones at the end
"""

from __future__ import annotations

import collections
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence

from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import Change

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
            memory.free(memory.run([tower] * towers))
        memory.replace(memory.run([update], memory.named(gradients, found)))
    return memory.arrays.peak


_Name = tuple[int, str]
"""(Number of the run of a graph, tensor)."""


class _Memory:
    """The memory of a device.

    Attributes:
      arrays: the allocator.
    """

    def __init__(self, state: Sequence[float]) -> None:
        self.arrays = BestFit()
        self._runs = 0
        self._random = random.Random(0)
        self._state: dict[float, list[Hashable]] = {}  # {bytes: weights and slots}
        for number, size in enumerate(state):
            self.arrays.take(number, size)
            self._state.setdefault(size, []).append(number)

    def run(
        self, graphs: Sequence[Ops], given: Mapping[_Name, float] | None = None
    ) -> dict[_Name, float]:
        """Runs graphs side by side; returns {name: bytes} of what they leave.

        Args:
          graphs: their ops.
          given: {name: bytes} of arrays that the only graph may free; see `named`.
        """
        held = dict(given or {})
        left = {self._runs + i: collections.deque(graph) for i, graph in enumerate(graphs)}
        self._runs += len(graphs)
        running: dict[int, Change] = {}
        while left:
            most = max(map(len, left.values()))
            number = self._random.choice([n for n in left if len(left[n]) >= most - _MOST_AHEAD])
            if number in running:
                self._end(number, running.pop(number), held)
            if left[number]:
                running[number] = self._begin(number, left[number].popleft(), held)
            else:
                del left[number]
        return held

    def _begin(self, number: int, op: Change, held: dict[_Name, float]) -> Change:
        for tensor, size in op.takes.items():
            if size:
                held[number, tensor] = size
                self.arrays.take((number, tensor), size, count=op.items.get(tensor, 1))
        if op.temporary:
            self.arrays.take((number, ""), op.temporary)
        return op

    def _end(self, number: int, op: Change, held: dict[_Name, float]) -> None:
        self.arrays.give_back((number, ""))
        if op.overwrites:
            before, after = ((number, tensor) for tensor in op.overwrites)
            self.arrays.rename(before, after)
            held[after] = held.pop(before)
        for tensor in op.frees:
            if held.pop((number, tensor), None) is not None:
                self.arrays.give_back((number, tensor))

    def named(self, inputs: Mapping[str, float], found: dict[_Name, float]) -> dict[_Name, float]:
        """Gives arrays to the inputs of the next graph, by their bytes, and frees the others.

        Inputs that share an array with another one, such as gradients of weights that are added,
        get one of their own: what the graph does with one of them must not free the other.
        """
        of_size: dict[float, list[_Name]] = {}
        for name, size in found.items():
            of_size.setdefault(size, []).append(name)
        given = {}
        for tensor, size in inputs.items():
            given[self._runs, tensor] = size
            if of_size.get(size):
                self.arrays.rename(of_size[size].pop(), (self._runs, tensor))
            else:
                self.arrays.take((self._runs, tensor), size)
        self.free(name for names in of_size.values() for name in names)
        return given

    def free(self, found: Iterable[_Name]) -> None:
        """Frees arrays."""
        for name in found:
            self.arrays.give_back(name)

    def replace(self, found: Mapping[_Name, float]) -> None:
        """Frees weights and slots for each new array of as many bytes; frees what is none."""
        for name, size in found.items():
            before = self._state.get(size)
            self.arrays.give_back(before.pop(0) if before else name)
            if before is not None:
                before.append(name)
