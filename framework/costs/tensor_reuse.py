"""How far apart the uses of a tensor are, from which follows whether a cache still holds it.

    a = f(x)     writes a                           the next op reads a from a cache
    b = g(a)
    ...          the ops between move 100 MB
    c = h(a, b)  reads a                            the last one reads it from memory

The distance of two uses is the number of bytes that were moved from the start of the first to the
start of the second (reuse distance: Mattson et al. 1970, "Evaluation techniques for storage
hierarchies", there in different bytes). A graph runs again and again, so what it did not use before
was last used when it ran before.

A new tensor takes memory that was freed. Tensors that live briefly pass the same memory on, which
is in a cache; for one that lives long, memory is needed that was not used as long. So the distance
of writing a tensor is that to its last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """What one op, or a loop of a cluster, reads and writes.

    Attributes:
      reads: [(tensor, bytes)].
      writes: the same.
      others: bytes that it moves besides, in graphs of its own.
    """

    reads: Sequence[tuple[str, float]] = ()
    writes: Sequence[tuple[str, float]] = ()
    others: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of the tensors, without `others`."""
        return sum(size for _, size in (*self.reads, *self.writes))

    def by_others(self, others: float) -> Move:
        """Returns a use of the same tensors, whose bytes are among those of graphs of its own."""
        reads, writes = ([(name, 0.0) for name, _ in each] for each in (self.reads, self.writes))
        return Move(reads, writes, others)


def distances(moves: Sequence[Move], *, between: float = 0.0) -> list[list[tuple[float, float]]]:
    """Returns [(bytes, distance)] of the reads and writes of each move, in the order of a run.

    A tensor that is written and never read is used after the graph.

    Args:
      moves: what the ops of a graph read and write.
      between: bytes that other graphs move from one run of this one to the next.
    """
    starts, total = [], 0.0
    for move in moves:
        starts.append(total)
        total += move.bytes + move.others
    total += between
    timed = list(zip(starts, moves, strict=True))
    read = {name: at for at, move in timed for name, _ in move.reads}
    used = {n: at - total for at, move in timed for n, _ in (*move.reads, *move.writes)}
    found = []
    for at, move in timed:
        of_move = [(size, at - used[name]) for name, size in move.reads]
        of_move += [(size, read.get(name, total) - at) for name, size in move.writes]
        used.update((name, at) for name, _ in (*move.reads, *move.writes))
        found.append(of_move)
    return found
