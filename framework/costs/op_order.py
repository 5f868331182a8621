"""The order in which TensorFlow's executor runs the ops of a graph.

`executor.py` has the order of threads that take some time for each op.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from tekso.framework.costs.equal_ops import Merged


def as_they_get_ready(ops: Sequence[Any], merged: Merged) -> list[Any]:
    """Returns ops in the order of an executor with many idle threads: first what was ready first.

    So an op of the backward pass that needs values of the forward pass only runs early.
    """
    waiting = Waiting(Followers(ops, merged))
    ready = collections.deque(waiting.ready)
    found = []
    while ready:
        op = ready.popleft()
        found.append(op)
        ready += waiting.made_ready(op)
    return found


class Followers:
    """The ops that wait for each op of a graph.

    Args:
      ops: the ops that run.
      merged: ops that TensorFlow merges with one of them.

    Attributes:
      of: {op: those that wait for it}.
      waits: {op: number of ops for which it waits}.
      first: the ops that wait for none.
    """

    def __init__(self, ops: Sequence[Any], merged: Merged) -> None:
        names = {op.name for op in ops}
        self.waits: dict[str, int] = {}
        self.of: dict[str, list[Any]] = {}
        for op in ops:
            before = {merged.op_name(t.op) for t in op.inputs}
            before |= {merged.op_name(o) for o in op.control_inputs}
            before &= names
            self.waits[op.name] = len(before)
            for name in before:
                self.of.setdefault(name, []).append(op)
        self.first = [op for op in ops if not self.waits[op.name]]


class Waiting:
    """Ops that wait for others, in a run.

    Args:
      followers: those of the graph.

    Attributes:
      ready: the ops that wait for none.
    """

    def __init__(self, followers: Followers) -> None:
        self._followers, self._waits = followers.of, dict(followers.waits)
        self.ready = followers.first

    def made_ready(self, op: Any) -> list[Any]:
        """Returns the ops that waited only for this one."""
        found = []
        for after in self._followers.get(op.name, []):
            self._waits[after.name] -= 1
            if not self._waits[after.name]:
                found.append(after)
        return found
