"""Simulates the order in which threads run the ops of graphs, as TensorFlow's executor does.

An op that others wait for makes several of them ready at once, such as the gradients of the input
and of the filter of a convolution:

short ops   run next, on the same thread
long ops    the thread goes on with one of them, and puts the others on top of its own stack

A thread without an op takes the upper one of its stack, or else the lowest one of another thread.
So if each thread is busy with a graph of its own, the gradients of all inputs come first, and then
those of the filters, the latest first; until then, they hold saved activations and gradients. An
idle thread computes the gradients of the filters meanwhile, the earliest first.

Source:
  ExecutorState::ScheduleReady of TensorFlow, and RunQueue of Eigen's thread pool.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tekso.framework.costs import op_order
from tekso.framework.costs.equal_ops import Merged

_SHORT_S = 3e-6  # 8000 cycles
_WAKE_S = 5e-6  # until an idle thread finds what another one put on its stack
_SPREAD = 0.1  # by how much the time of an op differs from run to run


class TimedOps(NamedTuple):
    """The ops of a graph.

    Attributes:
      ops: those that run.
      merged: ops that TensorFlow merges with one of them.
      seconds: {name: time} of ops.
    """

    ops: Sequence[Any]
    merged: Merged
    seconds: Mapping[str, float]


class Event(NamedTuple):
    """The begin or the end of an op.

    Attributes:
      graph: number of the graph.
      op: the op.
      ends: whether it ends.
    """

    graph: int
    op: Any
    ends: bool


class _Running(NamedTuple):
    end: float
    number: int  # of two that end at the same time, the earlier one ends first
    thread: int
    ready: tuple[int, Any] | None  # None: an idle thread looks for an op


def events(graphs: Sequence[TimedOps], *, threads: int, chance: random.Random) -> Iterator[Event]:
    """Returns what happens while threads run graphs side by side, in the order of time.

    Args:
      graphs: the graphs.
      threads: number of threads.
      chance: decides what differs from run to run.
    """
    waiting = [op_order.Waiting(graph.ops, graph.merged) for graph in graphs]
    at_once: list[collections.deque[Any]] = [collections.deque() for _ in range(threads)]
    stacks: list[collections.deque[Any]] = [collections.deque() for _ in range(threads)]
    for number, one in enumerate(waiting):
        first = list(one.ready)
        for op in first:
            if op.type == "Placeholder":
                yield Event(number, op, ends=False)
                yield Event(number, op, ends=True)
                first += one.made_ready(op)
            else:
                stacks[chance.randrange(threads)].append((number, op))
    running: list[_Running] = []
    idle = set(range(threads))
    numbers = itertools.count()

    def start(thread: int, now: float) -> Iterator[Event]:
        ready = _next(thread, at_once, stacks)
        if ready is None:
            idle.add(thread)
            return
        idle.discard(thread)
        graph, op = ready
        seconds = graphs[graph].seconds[op.name] * chance.uniform(1 - _SPREAD, 1 + _SPREAD)
        heapq.heappush(running, _Running(now + seconds, next(numbers), thread, ready))
        yield Event(graph, op, ends=False)

    for thread in range(threads):
        yield from start(thread, 0.0)
    while running:
        now, _, thread, ready = heapq.heappop(running)
        if ready is None:
            if thread in idle:
                yield from start(thread, now)
            continue
        graph, op = ready
        yield Event(graph, op, ends=True)
        # TensorFlow optimizes the graph, which turns the order of the ops around.
        long: list[tuple[int, Any]] = []
        for after in waiting[graph].made_ready(op)[::-1]:
            kept = at_once[thread] if _is_short(graphs[graph], after) else long
            kept.append((graph, after))
        if long and not at_once[thread]:
            at_once[thread].append(long.pop())
        for left in long:
            stacks[thread].appendleft(left)
        yield from start(thread, now)
        if long:
            for other in idle:
                heapq.heappush(running, _Running(now + _WAKE_S, next(numbers), other, None))


def _next(thread: int, at_once: Sequence[Any], stacks: Sequence[Any]) -> tuple[int, Any] | None:
    """Takes the op that a thread runs next; None: there is none."""
    if at_once[thread]:
        return at_once[thread].popleft()  # type: ignore[no-any-return]
    if stacks[thread]:
        return stacks[thread].popleft()  # type: ignore[no-any-return]
    for other in range(1, len(stacks)):
        stack = stacks[(thread + other) % len(stacks)]
        if stack:
            return stack.pop()  # type: ignore[no-any-return]
    return None


def _is_short(graph: TimedOps, op: Any) -> bool:
    return graph.seconds[op.name] < _SHORT_S or op_order.is_short(op)
