"""The context in which a trial of a task computes op by op, and counts the ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, cast

from tensorflow.python.framework import op_callbacks

from tekso.framework import loops
from tekso.framework.context import StepContext


class OpCount:
    """Counts ops that run one by one.

    Attributes:
      run: number of ops.
      kinds: types of the ops.
    """

    def __init__(self) -> None:
        self.run, self._repeated = 0, 0.0
        self.kinds = set[str]()

    @property
    def traced(self) -> float:
        """Number of ops that a trace would have: those of loops count once."""
        return self.run - self._repeated

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the ops of a block."""
        op_callbacks.add_op_callback(self._observe)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._observe)

    @contextlib.contextmanager
    def loop(self, iterations: int) -> Iterator[None]:
        """Counts the ops of a block that is a loop, which may have other loops inside."""
        run, repeated = self.run, self._repeated
        yield
        inside = self._repeated - repeated
        more = (self.run - run) * (1 - 1 / iterations)
        self._repeated = repeated + more + inside / iterations

    def _observe(self, kind: str | bytes, *args: Any, graph: Any = None, **rest: Any) -> None:
        self.run += graph is None
        self.kinds.add(kind.decode() if isinstance(kind, bytes) else kind)


def _counted_scan(
    ctx: StepContext, body: Any, theta: Any, state: Any, xs: Any, **options: Any
) -> Any:
    with cast(OpByOp, ctx).count.loop(loops.iterations_of(xs)):
        return loops.scan(ctx, body, theta, state, xs, **options)


class OpByOp(StepContext):
    """A context for computing op by op, which counts the ops of loops."""

    forms = MappingProxyType({"scan": _counted_scan})

    def __init__(self, *, count: OpCount, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count  # also of copies of this
