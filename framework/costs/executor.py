"""Simulates the order in which threads run the ops of graphs, as TensorFlow's executor does.

An op that others wait for makes several of them ready at once, such as the gradients of the input
and of the matrix of a product:

short ops   run next, on the same thread
long ops    the thread continues with one of them, and puts the others on top of its own stack

A thread without an op takes the upper one of its stack, or else the lowest one of another thread.
So if each thread is busy with a graph of its own, the order depends on what it continues with:

a product       the gradient of the input: those of all inputs come first, and then those of the
                matrices, the latest first; until then, they hold saved activations and gradients.
                An idle thread computes those of the matrices meanwhile, the earliest first
a convolution   the gradient of the filter, so that of the input comes right after it

Source:
  ExecutorState::ScheduleReady of TensorFlow, and RunQueue of Eigen's thread pool.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from tekso.framework.costs import graph_work, op_kinds, op_order
from tekso.framework.costs.equal_ops import Merged

SHORT_S = 3e-6
"""An op of less time runs on the thread that made it ready: 8000 cycles."""
_OF_SHAPES = frozenset({"ShapeN", "Size", "Rank"})
_WAKE_S = 5e-6  # until an idle thread finds what another one put on its stack
_SPREAD = 0.1  # by how much the time of an op differs from run to run


@dataclasses.dataclass(frozen=True)
class TimedOps:
    """The ops of a graph.

    Attributes:
      ops: those that run.
      merged: ops that TensorFlow merges with one of them.
      seconds: {name: time} of ops.
      collectives: names of collectives, and of loops of some.
    """

    ops: Sequence[Any]
    merged: Merged
    seconds: Mapping[str, float]
    collectives: Set[str] = frozenset()

    @functools.cached_property
    def followers(self) -> op_order.Followers:
        """The ops that wait for each op."""
        return op_order.Followers(self.ops, self.merged)

    @functools.cached_property
    def staying(self) -> Set[str]:
        """Names of ops that run on the thread that made them ready."""
        return {op.name for op in self.ops if _stays_on_thread(op, self.seconds[op.name])}


def collectives_of(ops: Iterable[Any]) -> frozenset[str]:
    """Returns the names of ops that exchange tensors with other devices, and of their loops."""
    return frozenset(op.name for op in ops if _is_collective(op))


def _is_collective(op: Any) -> bool:
    if op.type in op_kinds.COLLECTIVES:
        return True
    _, inner = graph_work.inside(op)
    return any(_is_collective(one) for graph in inner for one in graph.get_operations())


class OpEvent(NamedTuple):
    """The begin or the end of an op.

    Attributes:
      graph: number of the graph.
      op: the op.
      ends: whether it ends.
    """

    graph: int
    op: Any
    ends: bool


def events(graphs: Sequence[TimedOps], *, threads: int, chance: random.Random) -> Iterator[OpEvent]:
    """Returns what happens while threads run graphs side by side, in the order of time.

    A collective ends after all graphs have begun it; no thread waits for that.

    Args:
      graphs: the graphs.
      threads: number of threads.
      chance: decides what differs from run to run.
    """
    return _Executor(graphs, threads, chance, spread=_SPREAD).events()


def elapsed_seconds(graphs: Sequence[TimedOps], *, threads: int) -> float:
    """Returns the time until threads have run graphs side by side, each op in exactly its time."""
    run = _Executor(graphs, threads, random.Random(0), spread=0.0)
    collections.deque(run.events(), maxlen=0)
    return run.end


Ready = tuple[int, Any]
"""Number of a graph, and an op of it."""


class _Running(NamedTuple):
    end: float
    number: int  # of two that end at the same time, the earlier one ends first
    thread: int | None  # None: of a collective
    ready: Ready | None  # None: an idle thread looks for an op


class _Executor:
    """Threads that have not begun yet; see `events`.

    Attributes:
      end: when the last op so far has ended.
    """

    def __init__(
        self, graphs: Sequence[TimedOps], threads: int, chance: random.Random, *, spread: float
    ) -> None:
        self.end = 0.0
        self._graphs, self._chance, self._spread = graphs, chance, spread
        self._waiting = [op_order.Waiting(graph.followers) for graph in graphs]
        self._threads = range(threads)
        self._at_once: list[collections.deque[Ready]] = [collections.deque() for _ in self._threads]
        self._stacks: list[collections.deque[Ready]] = [collections.deque() for _ in self._threads]
        self._idle = set(self._threads)
        self._running: list[_Running] = []  # a heap
        self._numbers = itertools.count()
        self._arrived: dict[str, list[int]] = {}  # {collective: graphs that have begun it}

    def events(self) -> Iterator[OpEvent]:
        """Runs everything."""
        yield from self._begin_graphs()
        for thread in self._threads:
            yield from self._start(thread, 0.0)
        while self._running:
            now, _, owner, ready = heapq.heappop(self._running)
            if ready is not None:
                self.end = now
                yield OpEvent(*ready, ends=True)
                if self._place_followers(owner, *ready):
                    for other in self._idle:
                        self._push(now + _WAKE_S, other, None)
            if owner is not None and (ready is not None or owner in self._idle):
                yield from self._start(owner, now)

    def _begin_graphs(self) -> Iterator[OpEvent]:
        """Puts ops without inputs on stacks; inputs of a graph take no time."""
        for number, waiting in enumerate(self._waiting):
            first = list(waiting.ready)
            for op in first:
                if op.type == "Placeholder":
                    yield OpEvent(number, op, ends=False)
                    yield OpEvent(number, op, ends=True)
                    first += waiting.made_ready(op)
                else:
                    self._chance.choice(self._stacks).append((number, op))

    def _start(self, thread: int, now: float) -> Iterator[OpEvent]:
        """Begins the next op on a thread."""
        self._idle.discard(thread)
        while (ready := self._next(thread)) is not None:
            graph, op = ready
            yield OpEvent(graph, op, ends=False)
            factor = self._chance.uniform(1 - self._spread, 1 + self._spread)
            end = now + self._graphs[graph].seconds[op.name] * factor
            if op.name not in self._graphs[graph].collectives:
                self._push(end, thread, ready)
                return
            arrived = self._arrived.setdefault(op.name, [])
            arrived.append(graph)
            if len(arrived) == len(self._graphs):
                for each in arrived:
                    self._push(end, None, (each, op))
        self._idle.add(thread)

    def _place_followers(self, thread: int | None, graph: int, op: Any) -> bool:
        """Queues the ops that waited for this one; returns whether another thread may take any.

        TensorFlow optimizes the graph, which turns the order of the ops around. For oneDNN, it then
        replaces the gradients of convolutions by new ops, of which those of filters come last.
        """
        made_ready = self._waiting[graph].made_ready(op)[::-1]
        made_ready.sort(key=lambda one: one.type in op_kinds.FILTER_GRADIENTS)
        if thread is None:
            stack = self._chance.choice(self._stacks)
            stack.extendleft((graph, one) for one in made_ready)
            return bool(made_ready)
        long: list[Ready] = []
        at_once = self._at_once[thread]
        for one in made_ready:
            stays = one.name in self._graphs[graph].staying
            (at_once if stays else long).append((graph, one))
        if long and not at_once:
            at_once.append(long.pop())
        self._stacks[thread].extendleft(long)
        return bool(long)

    def _push(self, end: float, thread: int | None, ready: Ready | None) -> None:
        heapq.heappush(self._running, _Running(end, next(self._numbers), thread, ready))

    def _next(self, thread: int) -> Ready | None:
        """Takes the op that a thread runs next; None: there is none."""
        if self._at_once[thread]:
            return self._at_once[thread].popleft()
        if self._stacks[thread]:
            return self._stacks[thread].popleft()
        for other in self._threads[1:]:
            stack = self._stacks[(thread + other) % len(self._threads)]
            if stack:
                return stack.pop()
        return None


def _stays_on_thread(op: Any, seconds: float) -> bool:
    """Returns whether an op runs on the thread that made it ready, as it is short."""
    return seconds < SHORT_S or op.type in op_kinds.INSTANT | op_kinds.EXISTING_MEMORY | _OF_SHAPES
