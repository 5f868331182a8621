"""The order in which TensorFlow's executor runs the ops of a graph.

An op that others wait for makes several of them ready at once, such as the gradients of the input
and of the filter of a convolution:

threads idle      one takes each of the ops: first the one that was ready first
all others busy   the thread goes on with the first one that it made ready, and puts the rest on a
                  stack. So the gradients of all inputs come first, and then those of the filters,
                  the latest first. Until then, they hold saved activations and gradients.

Source:
  ExecutorState::ScheduleReady of TensorFlow, and RunQueue of Eigen's thread pool.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tekso.framework.costs import graph_work, op_kinds
from tekso.framework.costs.equal_ops import Merged

_SHORT_BYTES = 1 << 15
"""An op on smaller tensors counts as one of less than 3 us, which TensorFlow runs at once."""
_OF_SHAPES = frozenset({"ShapeN", "Size", "Rank"})


def as_they_get_ready(ops: Sequence[Any], merged: Merged) -> list[Any]:
    """Returns ops in the order of an executor with idle threads: first what was ready first.

    So an op of the backward pass that needs values of the forward pass only runs early.
    """
    waiting = _Waiting(ops, merged)
    ready = collections.deque(waiting.ready)
    found = []
    while ready:
        op = ready.popleft()
        found.append(op)
        ready += waiting.made_ready(op)
    return found


def on_one_thread(ops: Sequence[Any], merged: Merged) -> list[Any]:
    """Returns ops in the order of an executor that has a thread, while all others are busy."""
    waiting = _Waiting(ops, merged)
    at_once = collections.deque(waiting.ready)
    stack: list[Any] = []
    found = []
    while at_once or stack:
        op = at_once.popleft() if at_once else stack.pop()
        found.append(op)
        # TensorFlow optimizes the graph, which turns the order of the ops around.
        made_ready = waiting.made_ready(op)[::-1]
        at_once += [one for one in made_ready if _is_short(one)]
        stack += [one for one in made_ready if not _is_short(one)]
    return found


class _Waiting:
    """Ops that wait for others.

    Attributes:
      ready: the ops that wait for none.
    """

    def __init__(self, ops: Sequence[Any], merged: Merged) -> None:
        names = {op.name for op in ops}
        self._waits: dict[str, int] = {}
        self._followers: dict[str, list[Any]] = {}
        for op in ops:
            before = {merged.op_name(t.op) for t in op.inputs}
            before |= {merged.op_name(o) for o in op.control_inputs}
            before &= names
            self._waits[op.name] = len(before)
            for name in before:
                self._followers.setdefault(name, []).append(op)
        self.ready = [op for op in ops if not self._waits[op.name]]

    def made_ready(self, op: Any) -> list[Any]:
        """Returns the ops that waited only for this one."""
        found = []
        for after in self._followers.get(op.name, []):
            self._waits[after.name] -= 1
            if not self._waits[after.name]:
                found.append(after)
        return found


def _is_short(op: Any) -> bool:
    if op.type in op_kinds.INSTANT | op_kinds.EXISTING_MEMORY | _OF_SHAPES:
        return True
    moved = op.outputs if op.type in op_kinds.SLICES else (*op.inputs, *op.outputs)
    sizes = [graph_work.size(t) * (t.dtype.size or 0) for t in moved]
    return not graph_work.inside(op)[1] and max(sizes, default=0) < _SHORT_BYTES
