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
    waiting = Waiting(ops, merged)
    ready = collections.deque(waiting.ready)
    found = []
    while ready:
        op = ready.popleft()
        found.append(op)
        ready += waiting.made_ready(op)
    return found


class Waiting:
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
