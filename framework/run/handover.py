"""Hands the state over to the thread that writes it, with a limited number of bytes in memory.

state ─► part 3 (is read) ─► handover: part 2 ─► part 1 (is written) ─► files
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from tekso.framework.execution import shards
from tekso.framework.execution.shards import Shard
from tekso.framework.run.tensor_files import Piece, on_host

T = TypeVar("T")


class Handover(Generic[T]):
    """A queue between two threads: one calls `put` and `end`, the other iterates and `close`s.

    The bytes of an item count from before it is made until the receiver asks for the next one.

    Args:
      most_bytes: maximum number of bytes in memory. A single larger item is accepted.

    Attributes:
      held_bytes: bytes in memory now.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._items: collections.deque[tuple[int, T]] = collections.deque()
        self._changed = threading.Condition()
        self._has_ended = self._is_closed = False
        self._error: BaseException | None = None
        self.held_bytes = 0

    def put(self, size_bytes: int, make: Callable[[], T]) -> bool:
        """Waits for room, then makes an item and hands it over; False if the receiver closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(size_bytes))
            if self._is_closed:
                return False
            self.held_bytes += size_bytes
        item = make()
        with self._changed:
            self._items.append((size_bytes, item))
            self._changed.notify_all()
        return True

    def _has_room(self, size_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + size_bytes <= self._most_bytes

    def end(self, error: BaseException | None = None) -> None:
        """Ends the items; with an error, the receiver raises it after the last item."""
        with self._changed:
            self._has_ended, self._error = True, error
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        """Yields the items in order."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._has_ended)
                if not self._items:
                    if self._error is not None:
                        raise self._error
                    return
                size_bytes, item = self._items.popleft()
            yield item
            del item
            with self._changed:
                self.held_bytes -= size_bytes
                self._changed.notify_all()

    def close(self) -> None:
        """Tells the sender that no more items are needed, and drops the items in between."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()


def grouped(state: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Groups pieces into parts of at most CHUNK_BYTES, so that small tensors share a file."""
    part: list[Shard] = []
    for shard in state:
        if part and size_bytes_of(part) + shard.size_bytes > shards.CHUNK_BYTES:
            yield part
            part = []
        part.append(shard)
    if part:
        yield part


def size_bytes_of(part: Iterable[Shard]) -> int:
    """Returns the bytes of some pieces."""
    return sum(shard.size_bytes for shard in part)


def hand_over(parts: Iterable[Sequence[Shard]], handover: Handover[list[Piece]]) -> None:
    """Reads the parts one after the other, until all are read or the receiver has closed."""
    try:
        for part in parts:
            if not handover.put(size_bytes_of(part), functools.partial(_read, part)):
                return
    except BaseException as error:
        handover.end(error)
        raise
    handover.end()


def _read(part: Sequence[Shard]) -> list[Piece]:
    return list(map(on_host, part))
