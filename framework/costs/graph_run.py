"""A run of a graph on a simulated device: its ops allocate and free memory, and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping

from tekso.framework.costs.best_fit import BestFit
from tekso.framework.costs.graph_memory import Change


class HeldMemory:
    """The memory of an array, or of the items of a list; free when nothing refers to it.

    Args:
      arrays: the allocator.
      size: bytes to allocate; None: none yet.

    Attributes:
      size: bytes that it was asked for.
    """

    def __init__(self, arrays: BestFit, size: float | None = None) -> None:
        self._arrays, self.size = arrays, 0.0
        if size is not None:
            self.take(size)

    def __del__(self) -> None:
        self._arrays.give_back(id(self))

    def take(self, size: float, *, count: int = 1) -> None:
        """Allocates an array, or `count` equal arrays of `size` bytes together."""
        self.size = size
        self._arrays.take(id(self), size, count=count)

    def take_over(self, other: HeldMemory) -> None:
        """Takes what another one has."""
        self.size = other.size
        self._arrays.rename(id(other), id(self))


Held = dict[tuple[int, str], HeldMemory]
"""Memory of tensors by the number of the run and the tensor, in the order of their ops."""


class GraphRun:
    """A run of a graph that has not ended yet.

    Args:
      arrays: the allocator.
      held: gets the memory of each tensor from its op until the op that frees it. It may have the
        memory of inputs that the ops free; runs may share it.
      number: number of the run.
      results: memory that waits for outputs, by tensor.
      variables: memory of each variable that has some, by name; the ops replace it.
    """

    def __init__(
        self,
        arrays: BestFit,
        held: Held,
        *,
        number: int = 0,
        results: Mapping[str, HeldMemory] | None = None,
        variables: dict[str, HeldMemory] | None = None,
    ) -> None:
        self._arrays, self._held, self._number = arrays, held, number
        self._results = results or {}
        self._variables = {} if variables is None else variables
        self._temporary: dict[str, HeldMemory] = {}  # of ops that run

    def begin(self, change: Change) -> None:
        """Begins an op."""
        for tensor, size in change.takes.items():
            if size:
                memory = self._results.get(tensor) or HeldMemory(self._arrays)
                memory.take(size, count=change.items.get(tensor, 1))
                self._held[self._number, tensor] = memory
        if change.temporary:
            self._temporary[change.op] = HeldMemory(self._arrays, change.temporary)

    def end(self, change: Change) -> None:
        """Ends an op that has begun."""
        self._temporary.pop(change.op, None)
        if change.overwrites:
            before, after = change.overwrites
            memory = self._held.pop((self._number, before))
            if after in self._results:
                self._results[after].take_over(memory)
                memory = self._results[after]
            self._held[self._number, after] = memory
        if change.assigns and (self._number, change.assigns[0]) in self._held:
            tensor, variable = change.assigns
            self._variables[variable] = self._held.pop((self._number, tensor))
        for tensor in change.frees:
            self._held.pop((self._number, tensor), None)
