"""Simulates TensorFlow's allocator, which gives an array more bytes than it asks for.

The allocator keeps what was freed, and gives an array the smallest free piece that is large enough.
It divides the piece only if it is at least twice as large as the array, or 128 MiB larger. So an
array may hold almost twice its bytes, and TensorFlow's statistics count all of them.

Source:
  Best fit with coalescing, as in Doug Lea's malloc; in TensorFlow, BFCAllocator.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable

_UNIT = 256  # sizes are multiples of it
_MOST_UNUSED = 128 << 20
_FIRST_REGION = 2 << 20


class BestFit:
    """An allocator that has not allocated anything yet.

    Attributes:
      held: bytes of the pieces that are in use.
      peak: the largest value of `held` since the start, or since `forget_peak`.
    """

    def __init__(self) -> None:
        """Starts without memory."""
        self.held = self.peak = 0
        self._region = _FIRST_REGION  # bytes of the next region
        self._end = 0  # of all regions
        self._free: list[tuple[int, int]] = []  # (size, address), ascending
        self._starts: dict[int, int] = {}  # {address of a free piece: size}
        self._ends: dict[int, int] = {}  # {end of a free piece: address}
        self._used: dict[Hashable, list[tuple[int, int]]] = {}  # {name: [(address, size)]}

    def take(self, name: Hashable, size: float, *, count: int = 1) -> None:
        """Allocates an array under a name, or `count` equal arrays of `size` bytes together."""
        self._used[name] = [self._taken(size / count) for _ in range(count)]

    def _taken(self, size: float) -> tuple[int, int]:
        wanted = max(1, -(-int(size) // _UNIT)) * _UNIT
        at = bisect.bisect_left(self._free, (wanted, 0))
        if at == len(self._free):
            self._extend(wanted)
            at = bisect.bisect_left(self._free, (wanted, 0))
        found, address = self._free[at]
        self._remove(address)
        if found >= 2 * wanted or found - wanted >= _MOST_UNUSED:
            self._add(address + wanted, found - wanted)
            found = wanted
        self.held += found
        self.peak = max(self.peak, self.held)
        return address, found

    def give_back(self, name: Hashable) -> None:
        """Frees the arrays of a name; does nothing if there are none."""
        for address, size in self._used.pop(name, ()):
            self._put_back(address, size)

    def _put_back(self, address: int, size: int) -> None:
        self.held -= size
        if address + size in self._starts:
            size += self._remove(address + size)
        if address in self._ends:
            before = self._ends[address]
            size += self._remove(before)
            address = before
        self._add(address, size)

    def rename(self, name: Hashable, to: Hashable) -> None:
        """Gives the arrays of a name to another one."""
        self._used[to] = self._used.pop(name)

    def forget_peak(self) -> None:
        """Makes `peak` begin anew."""
        self.peak = self.held

    def _extend(self, wanted: int) -> None:
        """Adds a region; regions double in size, and pieces of two regions never become one."""
        is_larger = False
        while self._region < wanted:
            self._region *= 2
            is_larger = True
        self._end += _UNIT
        self._add(self._end, self._region)
        self._end += self._region
        if not is_larger:
            self._region *= 2

    def _add(self, address: int, size: int) -> None:
        bisect.insort(self._free, (size, address))
        self._starts[address] = size
        self._ends[address + size] = address

    def _remove(self, address: int) -> int:
        """Removes a free piece; returns its size."""
        size = self._starts.pop(address)
        del self._ends[address + size]
        self._free.pop(bisect.bisect_left(self._free, (size, address)))
        return size
