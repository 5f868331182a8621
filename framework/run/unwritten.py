"""The parts of a state that wait to be written to a checkpoint by another thread.

state ─► parts 2, 3, …: values of the variables ─► part 1 (is read and written) ─► files

A part that waits refers to the tensors of the variables, so it needs no memory until a training
step replaces them. A step may do so when the parts that are left are small (`UpdateGate`).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Iterator, Sequence

from tekso.framework.execution import shards
from tekso.framework.execution.shards import Shard
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.run.tensor_files import Piece, on_host


class Unwritten:
    """Parts that wait; the thread that writes them iterates, and then calls `close`.

    Args:
      parts: the pieces of each part.
      most_bytes: bytes of parts that may wait while the gate is open.
      gate: closed until only `most_bytes` wait.
    """

    def __init__(
        self, parts: Iterable[Sequence[Shard]], *, most_bytes: int, gate: UpdateGate
    ) -> None:
        self._parts = collections.deque(parts)
        self._most_bytes, self._gate = most_bytes, gate
        self._lock = threading.Lock()
        self.size_bytes = sum(map(size_bytes_of, self._parts))
        self._left_bytes = self.size_bytes
        if self._left_bytes > most_bytes:
            gate.close()

    def __iter__(self) -> Iterator[list[Piece]]:
        """Yields the pieces of each part with their values; the part before is released then."""
        while True:
            with self._lock:
                if not self._parts:
                    return
                part = self._parts.popleft()
            size_bytes = size_bytes_of(part)
            yield list(map(on_host, part))
            del part
            self._left_bytes -= size_bytes
            if self._left_bytes <= self._most_bytes:
                self._gate.open()

    def close(self) -> None:
        """Drops the parts that are left, and opens the gate."""
        with self._lock:
            self._parts.clear()
        self._gate.open()


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
